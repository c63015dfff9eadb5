"""Engines in the configuration: options, choice of an engine, requirements, plugins.

Whatever may import `config` may import from here.
"""
