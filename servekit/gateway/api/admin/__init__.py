"""Administration over HTTP: health, status, models, adapters, metrics.

Only `gateway` may import from here.
"""
