"""Sleep: releasing a device's memory and taking it back.

Code outside the transformers engine must not import from here.
"""
