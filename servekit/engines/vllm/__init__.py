"""The vLLM engine: vLLM's scheduler and model run in processes of their own, without its front end.

vLLM's `AsyncLLM` is a client of an engine core, which runs in another process, and a loop that
detokenises the core's outputs and passes them to a queue and a task per request. The worker
detokenises itself, so this engine is a client of the same core and takes its outputs directly: one
list per step, for all requests.

    library              the installed vLLM, and the choice between its core and its own server
    engine_args          a WorkerSpec as vLLM's arguments
    argument_parser      the option `engine_args`, by vLLM's own parser and as flags
    core                 the core: its process, our extensions in it, the client of it
    requests             jobs as requests of the core, and its outputs as outputs of the engine
    request_table        the requests in flight
    engine               the life cycle of the core, and the loop
    embedding_batches    the sender of embedding jobs
    probes               requests of the engine itself
    media_prompts        conversations with images, by vLLM's processors
    sleep                sleep and wake-up
    generation_defaults  stop tokens and sampling of the model's files
    adapters             LoRA
    server               the engine with vLLM's own server

Only the registry of `engines` may import from here.
"""
