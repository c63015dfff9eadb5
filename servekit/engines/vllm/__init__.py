"""vLLM as an engine: its scheduler and model in processes of their own, its front end left out.

vLLM's `AsyncLLM` is a client of an engine core, which runs elsewhere, and a loop that turns the
core's outputs into text and hands each request's to a queue and a task of its own. The worker makes
text itself, so this engine is a client of the same core and takes its outputs as they come: one
list for each step, of all requests.

    library      all that is used of vLLM, and the releases that were tried
    arguments    from a WorkerSpec to vLLM's own
    core         the core's client, and its death
    causes       why it has died, told by its own process
    requests     jobs as the core takes them, and what it brings as the worker takes it
    engine       the life of the core, and its loop
    adapters     LoRA
    scheduler    what has to be done inside the core
    ranks        and inside the processes that run the model
    activity     whether the core's processes do anything while they load
"""
