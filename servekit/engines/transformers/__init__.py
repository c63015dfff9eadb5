"""The transformers engine: loading, runners, and the folders that make it fast.

`batching` is continuous batching over the library's paged cache, `decode` the fast decode path,
`sampling` chooses tokens, `lora` adapters, `tensor_parallel` several devices, `sleep` frees them.
Nothing else may import from here, `engines.vllm` for adapters' files excepted.
"""
