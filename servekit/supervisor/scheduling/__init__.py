"""GPU memory: estimates, requests, reservations, placement on GPUs, admission while loading.

`placement` is the entry; `bin_packing`, `gpu_matching` and `shared_placement` are its algorithms.
Only the supervisor and `ray` may import from here.
"""
