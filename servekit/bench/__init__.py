"""`servekit bench`: load on any OpenAI-compatible server, and what came of it.

A client, not a part of the service. `run` measures one load after another; each is made by client
processes (`python -m servekit.bench`, see `process`) that are told their part in one JSON line on
stdin and report in JSON lines on stdout (`order`). What they report is gathered in a `tally`, which
becomes a `result`.
"""
