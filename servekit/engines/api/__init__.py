"""The interface of an engine, and base classes for engines that are written here or elsewhere.

Every part of `engines`, the worker and plugins may import from here; it imports no engine.
"""
