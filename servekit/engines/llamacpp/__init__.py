"""The `llamacpp` engine: llama.cpp's library, its models and their generation.

Nothing here imports torch or transformers: a worker of this engine starts in about a second.
"""
