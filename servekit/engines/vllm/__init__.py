"""vLLM as an engine: its scheduler and model in processes of their own, its front end left out.

vLLM's `AsyncLLM` is a client of an engine core, which runs elsewhere, and a loop that turns the
core's outputs into text and hands each request's to a queue and a task of its own. The worker makes
text itself, so this engine is a client of the same core and takes its outputs as they come: one
list for each step, of all requests. Written for vLLM 0.20; another is refused (`core.KNOWN`).

    arguments    from a WorkerSpec to vLLM's own
    requests     jobs as the core takes them, and what it brings as the worker takes it
    engine       the life of the core, and its loop
    adapters     LoRA
    scheduler    what has to be done inside the core
    activity     whether the core's processes do anything while they load
"""
