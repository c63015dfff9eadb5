"""Messages between processes, as msgspec structs, and the types that they share.

`messages` has those between gateways, workers and the supervisor, `control` the supervisor's
others; `transport` carries them. Every part may import from here; this folder imports only
`errors`.
"""
