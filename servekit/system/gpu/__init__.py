"""The GPUs of this machine, read in a process of its own (`nvml_process`).

The supervisor must never load a CUDA library. Every part of the package may import from here.
"""
