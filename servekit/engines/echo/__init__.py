"""The echo engine: answers with the prompt's own text; for tests, demos and benchmarks.

Only the registry of `engines` may import from here, by name.
"""
