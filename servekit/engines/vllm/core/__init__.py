"""vLLM's engine core: the process that runs it, our extensions in it, and the client of it.

    core_client          the client of the core, and the detection of its death
    core_host            the process that becomes the core, with its imports done before
    causes               the cause of a core's death, reported by its process
    scheduler            extensions inside the core's process
    worker_extension     extensions inside the processes that run the model

Only `engines.vllm` may import from here.
"""
