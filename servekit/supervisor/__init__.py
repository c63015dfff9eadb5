"""The supervisor: starts gateways and workers, keeps them running, and ends them all.

It handles no request, and never imports torch, a web framework, or anything that could open CUDA.
"""
