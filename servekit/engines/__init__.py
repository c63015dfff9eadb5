"""Engines by registry name. Importing this package imports no engine and no torch."""
