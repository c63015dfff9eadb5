"""Attacks on a running instance, by a client that shares no code with servekit.

`python -m tests.attacks` starts an instance for each attack, does the harm, compares every byte of
every answer with the text that is due, and prints a table. See `__main__`.
"""
