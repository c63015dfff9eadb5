"""YAML with line numbers and readable errors.

Only `config` may import from here.
"""
