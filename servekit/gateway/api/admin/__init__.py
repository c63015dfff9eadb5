"""Administration over HTTP: health, status, models, adapters, metrics.

Only the gateway may import from here.
"""
