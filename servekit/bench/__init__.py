"""`servekit bench`: load on any OpenAI-compatible server, and a report.

`run` measures loads one after another. Client processes (`python -m servekit.bench`) make a load:
they read their part as one JSON line and report in JSON lines; `aggregator` adds the reports up,
`result` is the outcome. Only `cli` may import from here; it imports no part of the service.
"""
