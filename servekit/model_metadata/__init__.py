"""Headers of model files (GGUF, safetensors, config.json): sizes, types, shapes, templates.

Nothing here imports torch or numpy, or uses the network. Unreadable files raise ValueError (or
LoadError). Every part may import from here; this folder imports only `errors`.
"""
