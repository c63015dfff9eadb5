"""The supervisor's messages with operators, fork servers, Ray and far gateways; starts, metrics.

Every part may import from here; this folder imports only `errors` and `protocol`.
"""
