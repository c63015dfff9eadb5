"""Output of the commands on a terminal: tables, lines and the help.

Only `cli` may import from here.
"""
