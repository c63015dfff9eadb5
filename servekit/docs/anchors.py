"""Anchors of headings."""

from __future__ import annotations


def make_anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    kept = "".join(one for one in heading.lower() if one.isalnum() or one in " -_")
    return kept.replace(" ", "-")
