"""Engines in the configuration: options, choice of an engine, requirements, plugins.

Every part that may import `config` may import from here.
"""
