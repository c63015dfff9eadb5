"""Choice of tokens on the host: masks, penalties, temperature, log probabilities.

Code outside the transformers engine must not import from here.
"""
