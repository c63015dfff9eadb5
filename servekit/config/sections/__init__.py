"""Types of the larger sections of the configuration file, which `schema` puts together.

Every part that may import from `config` may import from here.
"""
