"""What a model's files say of themselves before anything is loaded: sizes, types, shapes.

Nothing here imports torch or numpy, or asks a network. What cannot be read is a ValueError.
"""
