"""Sleep: freeing a device's memory and taking it back.

Only the transformers engine may import from here.
"""
