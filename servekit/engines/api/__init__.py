"""The engine interface, and base classes for built-in and third-party engines.

Only `engines`, `worker` and `plugin` may import from here; it imports no engine.
"""
