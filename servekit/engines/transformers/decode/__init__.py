"""The fast decode path of the transformers engine: steps that generate one token per request.

    batch_slots         the requests' slots in the batch, on the device and mirrored on the host
    page_table          the library's paged cache: pages of a request, and a step's attention
    kernels             paged attention, one query per request; `paged_triton` is our own kernel
    device_sampling     choice of tokens on the device, equal to `sampling`
    graphs              CUDA graphs of steps, one per batch size
    decode_loop         the steps themselves

A step reads all its input from tensors at fixed addresses, and leaves the next step's input there:
the chosen tokens, and positions advanced by one. So the next step starts before this one's tokens
are on the host. The end of a request is noticed one step late, and that step's token is discarded.
The library reads prompts, in steps between.

Only `engines.transformers` may import from here.
"""
