"""YAML with line numbers and sentences for mistakes.

Only `config` may import from here.
"""
