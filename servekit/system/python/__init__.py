"""Python interpreters of our processes: how they start, what they may import, where their code is.

Every part of the package may import from here.
"""
