"""The operating system and the GPUs: processes, sockets, limits, shared memory, NVML.

These modules know nothing of models and requests. NVML is asked in a process of its own
(`nvml_process`), because the supervisor must never load a CUDA library.
Every part of the package may import from here; this folder imports only `errors` and itself.
"""
