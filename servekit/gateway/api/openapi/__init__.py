"""The OpenAPI document: operations, response types, field texts, and the pages of the manual.

The package serves no inference request; it is imported on the first request for the document. Unit
tests check that answers fit these types. Only the gateway and `docs` may import from here.
"""
