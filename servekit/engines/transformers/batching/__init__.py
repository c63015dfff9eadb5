"""Continuous batching: the library's batch processor, scheduler and paged KV cache.

Code outside the transformers engine must not import from here.
"""
