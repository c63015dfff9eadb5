"""Rerankers and classifiers: Cohere's and Jina's rerank, vLLM's score and classify.

Only `gateway` may import from here.
"""
