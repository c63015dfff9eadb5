"""servekit: a process supervisor for model serving.

Importing this package imports nothing else: no torch, no web framework, no CUDA.
"""

__version__ = "0.1.0"
