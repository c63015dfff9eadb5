"""Edits of the package made one at a time, each with the tests that must fail."""
