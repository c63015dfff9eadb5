"""The operating system and the GPUs: processes, sockets, limits, shared memory, NVML.

These modules know nothing about models and requests. NVML is read in a separate process
(`nvml_process`), because the supervisor must never load a CUDA library. Every part of the package
may import from here; this folder imports only `errors`, `units` and the messages of `protocol`.
"""
