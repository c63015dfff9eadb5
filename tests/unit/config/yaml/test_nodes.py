"""Values with their places: how they are found, and what is left of them without."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.config.yaml.loader import parse_document
from servekit.config.yaml.nodes import Mark, find_node, format_place, mark_at, plain_value

ROOT = parse_document("a: 1\nlist:\n  - {b: x}\n  - c\n")


@pytest.mark.parametrize(
    ("loc", "depth", "key", "value"),
    [
        ((), 0, Mark(1, 1), None),
        (("a",), 1, Mark(1, 1), 1),
        (("list", 0, "b"), 3, Mark(3, 6), "x"),
        (("list", 1), 2, Mark(4, 5), "c"),
        (("list", 2), 1, Mark(2, 1), None),  # there is no third: the list is blamed
        (("list", "b"), 1, Mark(2, 1), None),
        (("list", 0, "z", "y"), 2, Mark(3, 5), None),
        (("a", "b"), 1, Mark(1, 1), 1),
        (("z",), 0, Mark(1, 1), None),
        ((0,), 0, Mark(1, 1), None),
    ],
)
def test_a_place_is_followed_as_far_as_it_goes(
    loc: tuple[str | int, ...], depth: int, key: Mark, value: object
) -> None:
    found = find_node(ROOT, loc)
    assert (found.depth, found.key) == (depth, key)
    if value is not None:
        assert found.node.value == value


def test_bare_values_have_no_empty_keys_and_keep_empty_items() -> None:
    root = parse_document("a: {b: , c: 1}\nd: [~, {e: }]\nf: \n")
    assert plain_value(root) == {"a": {"c": 1}, "d": [None, {}]}


def test_a_place_in_a_file_is_written_as_compilers_do() -> None:
    path = Path("/conf/servekit.yaml")
    assert format_place(path, Mark(3, 4)) == "/conf/servekit.yaml:3:4"
    assert format_place(path, None) == "/conf/servekit.yaml"


@pytest.mark.parametrize(
    ("index", "mark"), [(0, (1, 1)), (1, (1, 2)), (2, (1, 3)), (3, (2, 1)), (5, (3, 2))]
)
def test_lines_and_columns_count_from_one(index: int, mark: tuple[int, int]) -> None:
    assert mark_at("ab\n\ncd", index) == Mark(*mark)
