"""Messages between processes, as msgspec structs, and the types that they share.

`transport` carries them. Every part may import from here; this folder imports only `errors`.
"""
