"""Messages that cross a process boundary, as msgspec structs, and what they share.

`transport` carries them. Every part may import from here; this folder imports only `errors`.
"""
