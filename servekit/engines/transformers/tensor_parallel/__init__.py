"""One replica over several devices.

    tensor       every layer over all devices, one process each, by the model's own plan in
                 transformers (`tp_plan`)
    device_map   layer after layer, one process: `layers`

Under `tensor` the worker is rank 0. It schedules, samples and answers as always; the other ranks
are children of its own (`children`) that hold their shards and their part of the KV cache, and do
one thing: run the forward passes that rank 0 runs (`leader`, `rank`), with the same arguments
(`packing`). What is to be done they hear over a socket, so that who has nothing to do waits there
and not in a collective; tensors come by one broadcast.
"""
