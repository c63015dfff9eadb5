"""YAML with line numbers and readable errors.

Only `config` and `cli` may import from here.
"""
