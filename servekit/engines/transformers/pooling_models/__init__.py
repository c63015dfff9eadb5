"""Pooling models: embeddings, classifiers, cross-encoders and causal rerankers.

Only `engines.transformers` and `engines.vllm` may import from here.
"""
