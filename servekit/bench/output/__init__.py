"""The output of `servekit bench`: the live display, the report, the plot and the JSON document.

Only `bench` and `cli` may import from here.
"""
