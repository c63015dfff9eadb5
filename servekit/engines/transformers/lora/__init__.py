"""PEFT adapters: many fine-tunings of one loaded model, served beside it.

    files.py     where an adapter's files come from, and what their headers say
    limits.py    what is refused by its configuration alone
    skeleton.py  a second tree of modules over the same tensors, to build on and to compare with
    tuner.py     PEFT's own layers on a skeleton, checked by shape, and their weights
    modes.py     how an adapter shares batches, and why
    mixing.py    low-rank adapters and virtual tokens in the running model, token by token
    verify.py    the proofs an adapter must give before it is served; layers.py, tolerance.py
    shelf.py     loading and unloading: all of the above, in order

Nothing here is imported before a model is loaded, and peft not before an adapter is.
"""
