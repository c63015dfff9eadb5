"""The operating system and the GPUs: processes, sockets, limits, shared memory, NVML.

These modules know nothing about models and requests. `gpu` has the GPUs, `python` the interpreters
of our processes. Every part of the package may import from here; this folder imports only `errors`,
`units` and the messages of `protocol`.
"""
