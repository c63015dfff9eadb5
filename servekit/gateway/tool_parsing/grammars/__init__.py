"""Grammars that make a model call tools, in the syntax of its family.

Only `gateway.tool_parsing` may import from here.
"""
