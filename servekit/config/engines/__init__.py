"""Engines in the configuration: options, choice of an engine, requirements, plugins.

Parts that may import `config` may import from here.
"""
