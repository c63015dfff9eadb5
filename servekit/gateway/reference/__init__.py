"""What the gateway's answers look like, as types: for the OpenAPI document, and for nothing else.

No request comes by here: it is imported when the document is first asked for. Answers themselves
are written by the forms; that they fit these types is what tests/unit/gateway/reference checks.
"""
