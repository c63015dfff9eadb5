"""llama.cpp's shared library: its Python bindings or a folder with a build, and its C interface.

Only `engines.llamacpp` may import from here.
"""
