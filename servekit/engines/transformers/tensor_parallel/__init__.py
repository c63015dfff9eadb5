"""A replica over several devices.

    tensor       every layer over all devices, one process per device, by the model's own plan in
                 transformers (`tp_plan`)
    device_map   each layer on one device, in one process (`device_map`)

Under `tensor` the worker is rank 0. It schedules, samples and answers as usual. The other ranks are
its children (`rank_processes`); they hold their shards of the model and of the KV cache, and only
run the forward passes that rank 0 runs (`controller`, `rank_process`), with the same arguments
(`tensor_transfer`). They receive commands over a socket, so that an idle rank waits there and not
in a collective; all tensors arrive in one broadcast.

Images and recordings are read by rank 0 alone, before the others hear of them. Passes with these
run part by part in all ranks: the input embedding, the decoder with rank 0's embeddings, positions
and masks, and the head.

Only `engines.transformers` may import from here.
"""
