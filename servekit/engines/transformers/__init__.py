"""The transformers engine: model loading, runners, and the packages that they use.

`batching` holds continuous batching over the library's paged cache, `decode` the fast decode path,
`sampling` the choice of tokens, `pooling_models` embeddings and scores, `lora` adapters,
`tensor_parallel` models over several devices, and `sleep` the release of device memory. Code
outside this package must not import from here, except `engines.vllm` for adapter files.
"""

import logging

# peft imports torchao wherever it is installed, which complains of kernels for other GPUs.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
