"""The engine interface, and base classes for built-in and third-party engines.

Every part of `engines`, the worker and plugins may import from here; it imports no engine.
"""
