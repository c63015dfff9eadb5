"""GPU memory: estimates, requests, reservations, placement on GPUs, admission while loading.

`placement` is the entry; `bin_packing`, `gpu_matching` and `shared_placement` are its algorithms.
Only `supervisor`, `ray`, `cli` and `diagnostics` may import from here.
"""
