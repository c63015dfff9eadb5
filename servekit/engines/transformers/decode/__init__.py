"""The decode fast path of the transformers engine: steps in which every request brings one token.

    seats      who sits where in the batch, on the device and mirrored on the host
    pages      the library's paged cache: where a request's tokens are, and room for more
    kernels    attention over pages, one query for each request; `paged_triton` is our own
    choice     choosing tokens on the device, as `sampling` does
    graphs     CUDA graphs of steps, one for each size of batch
    path       the steps themselves

A step takes all it needs from tensors that stay where they are, and leaves the next one's input in
them: the chosen tokens, and positions that are one further. So the next step is started before
this one's tokens are on the host, and what ended with them is found out one step late; what that
step made of it is thrown away. Prompts are read by the library, in steps between.
"""
