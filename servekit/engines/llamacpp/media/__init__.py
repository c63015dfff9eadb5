"""Images and recordings in llama.cpp: libmtmd, the projectors it loads, and prompts with media.

Code outside the llamacpp engine must not import from here.
"""
