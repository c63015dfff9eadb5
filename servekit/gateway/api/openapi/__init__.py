"""The OpenAPI document: operations, response types, field texts, and the pages of the manual.

No request comes by here; it is imported when the document is first asked for. Unit tests check
that answers fit these types. Only the gateway and `docs` may import from here.
"""
