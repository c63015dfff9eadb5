"""PEFT adapters: many fine-tunings served beside the base model that they share.

    adapter_files.py  where an adapter's files come from, and the headers of these files
    config_checks.py  refusals that need only the adapter's configuration
    module_clone.py   skeletons: further module trees over the same tensors, to build on and compare
    peft_model.py     PEFT's own layers on a skeleton, checked by shape, and their weights
    batching_mode.py  how an adapter shares batches, and why
    batched_lora.py   low-rank adapters and virtual tokens in the running model, token by token
    verify.py         the checks before an adapter is served, and their tolerances
    manager.py        loading and unloading: all of the above, in order

Nothing here is imported before a model is loaded, and peft not before an adapter is.
"""
