"""The configuration file: its schema, and a reader with actionable errors.

`schema` and `sections` are the types; `yaml` parses text with line numbers, `engines`
has each engine's options and the Python environments that engines run in. Every part but
`protocol`, `system` and `engines` may import from here.
"""
