"""Continuous batching: the library's batch processor, scheduler and paged KV cache.

Only the transformers engine may import from here.
"""
