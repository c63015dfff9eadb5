"""Keys and their hashes."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.config import keys


def test_a_new_key_matches_its_hash_and_no_other() -> None:
    key, line = keys.new_key("al.ice-2")
    found = keys.parse_hash(line)
    assert key.startswith("sk-al.ice-2-")
    assert key not in line
    assert found.prefix == keys.prefix_of(key.encode()) == b"sk-al.ice-2-"
    assert found.matches(key.encode())
    assert not found.matches(key[:-1].encode() + b"!")
    assert keys.new_key("al.ice-2")[0] != key


@pytest.mark.parametrize("place", [0, 3, 4, 16, 31])
def test_every_byte_of_a_hash_is_compared(place: int) -> None:
    key, line = keys.new_key("x")
    found = keys.parse_hash(line)
    digest = bytearray(found.digest)
    digest[place] ^= 1
    assert len(found.digest) == 32
    assert not dataclasses.replace(found, digest=bytes(digest)).matches(key.encode())


def test_the_hash_is_scrypt_as_anyone_computes_it() -> None:
    key, line = keys.new_key("x")
    found = keys.parse_hash(line)
    theirs = hashlib.scrypt(
        key.encode(), salt=found.salt, n=2**14, r=8, p=1, maxmem=2**26, dklen=32
    )
    assert theirs == found.digest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a hash"),
        ("sk-alice-abcdef", "this is a key, not the hash"),
        ("sk-a-$scrypt$ln=24,r=8,p=1$" + "A" * 22 + "$" + "A" * 43, "128 MiB"),
        ("sk-a-$scrypt$ln=14,r=99,p=1$" + "A" * 22 + "$" + "A" * 43, "out of bounds"),
        ("sk-a-$scrypt$ln=14,r=8,p=1$short$" + "A" * 43, "not a hash"),
        ("sk-a-$argon2id$v=19$m=65536,t=3,p=4$AAAA$AAAA", "not a hash"),
    ],
)
def test_what_is_no_hash(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        keys.parse_hash(text)


@given(st.text(max_size=200))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        keys.parse_hash(text)
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("name", "fits"),
    [("a", True), ("a-b.c_d", True), ("a" * 63, True), ("a" * 64, False), ("-a", False),
     ("a-", False), ("", False), ("a b", False), ("é", False), ("a$", False)],
)  # fmt: skip
def test_names(name: str, fits: bool) -> None:
    assert keys.is_name(name) is fits


def test_digests_of_clear_keys_depend_on_their_salt() -> None:
    assert len(keys.fast_digest(b"key", b"1" * 32)) == 32
    assert keys.fast_digest(b"key", b"1" * 32) == keys.fast_digest(b"key", b"1" * 32)
    assert keys.fast_digest(b"key", b"1" * 32) != keys.fast_digest(b"key", b"2" * 32)
    assert keys.fast_digest(b"key", b"1" * 32) != keys.fast_digest(b"kez", b"1" * 32)
