"""On-demand models: which model is loaded, put to sleep or unloaded to make room for another.

`policy` decides and does nothing else; `manager` carries out. Only `supervisor` may import from
here.
"""
