"""llama.cpp under the engine `llamacpp`: its library, its models, and what runs on them.

Nothing here imports torch or transformers: a worker of this engine is up in about a second.
"""
