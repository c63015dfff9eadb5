"""Headers of model files (GGUF, safetensors, config.json): sizes, types, shapes, templates.

Nothing here imports torch or numpy, or asks a network. A file that cannot be read raises
ValueError. Every part may import from here; this folder imports only `errors`.
"""
