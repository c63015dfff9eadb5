"""Choosing tokens on the host: masks, penalties, temperature, log probabilities.

Only the transformers engine may import from here.
"""
