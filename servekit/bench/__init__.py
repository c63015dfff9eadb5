"""`servekit bench`: load on any OpenAI-compatible server, and a report.

`run` measures loads one after another. Client processes (`python -m servekit.bench`) generate a
load: they read their order as one JSON line and report in JSON lines; `aggregator` sums the
reports, `output` shows the outcome.

Only `cli` and `chaos` may import from here; it imports no part of the service.
"""
