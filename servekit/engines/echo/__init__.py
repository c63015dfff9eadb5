"""The echo engine: answers with the prompt's own words; for tests, demos and benchmarks.

Nothing else may import from here; the registry names it.
"""
