"""The OpenAPI document, and the pages of the manual. Only the gateway and `docs` import from here.

Unit tests check that answers fit the types that the document describes.
"""
