"""The OpenAPI document, and the pages of the manual. Only `gateway` may import from here.

Unit tests check that answers fit the types that the document describes.
"""
