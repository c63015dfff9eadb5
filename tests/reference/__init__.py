"""Generators of the parts of the documentation that restate the source.

`parts` finds the marks of a page and renews it; the other modules generate one part each.
"""
