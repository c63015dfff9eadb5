"""`servekit key ls` and `key rm`: keys of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from servekit.cli.main import app
from servekit.config.load import load_config

HASH = "$scrypt$ln=14,r=8,p=1$4auAcavI2cAA7ZZuSqDlPw$YSg3b31mfugmYIK+143XYKzcpneYIKR/wC+LyEf8zYk"
TEXT = f"""\
models: [{{name: a, engine: echo}}]
keys:   # of the team
  - name: alice
    hash: sk-alice-{HASH}
    admin: true
    # a note on her

  - hash: sk-bob-{HASH}
    name: bob
    max_concurrent: 3
server: {{port: 0}}  # stays
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "servekit.yaml"
    path.write_text(TEXT)
    return path


def run(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["key", *map(str, args)])
    return done.exit_code, done.output


def test_ls_shows_rights_and_limits_but_no_hash(file: Path) -> None:
    code, out = run("ls", "-c", file)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["KEY", "alice", "bob"]
    assert "admin" in out
    assert "3 at once" in out
    assert "scrypt" not in out + run("ls", "--json", "-c", file)[1]


@pytest.mark.parametrize(("gone", "stays"), [("alice", "bob"), ("bob", "alice")])
def test_rm_cuts_one_key_and_nothing_else(file: Path, gone: str, stays: str) -> None:
    assert run("rm", gone, "-c", file)[0] == 0
    assert [key.name for key in load_config(file).keys] == [stays]
    left, rest = file.read_text(), TEXT.splitlines()
    assert gone not in left
    assert left.splitlines()[:2] == rest[:2]
    assert left.splitlines()[-1] == rest[-1]
    assert [path.name for path in file.parent.iterdir()] == ["servekit.yaml"]


def test_a_link_and_the_ends_of_lines_stay(file: Path) -> None:
    kept = file.parent / "kept" / "of the team.yaml"
    kept.parent.mkdir()
    file.unlink()
    file.symlink_to(kept)
    kept.write_bytes(f"\ufeff# Schlüssel\n{TEXT}".replace("\n", "\r\n").encode())
    assert run("rm", "alice", "-c", file)[0] == 0
    assert file.is_symlink()
    left = kept.read_bytes().decode()
    assert left.startswith("\ufeff# Schlüssel\r\n") and "alice" not in left
    assert left.count("\n") == left.count("\r\n")
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert sorted(path.name for path in file.parent.iterdir()) == ["kept", file.name]


def test_whoever_read_the_file_still_may(file: Path) -> None:
    """As the user of a service, by its group, where root removes a key."""
    user = 1234 if os.getuid() == 0 else os.getuid()
    group = 4321 if os.getuid() == 0 else os.getgroups()[-1]
    os.chown(file, user, group)
    file.chmod(0o640)
    before = os.umask(0o077)
    try:
        assert run("rm", "alice", "-c", file)[0] == 0
    finally:
        os.umask(before)
    found = file.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (user, group, 0o640)


def test_the_last_key_stays(file: Path) -> None:
    run("rm", "alice", "-c", file)
    before = file.read_text()
    code, out = run("rm", "bob", "-c", file)
    assert (code, file.read_text()) == (2, before)
    assert "last key" in out


def test_an_unknown_key_and_one_in_brackets_are_sentences(file: Path) -> None:
    assert "did you mean 'alice'" in run("rm", "alise", "-c", file)[1]
    file.write_text(
        f"models: [{{name: a, engine: echo}}]\nkeys: [{{name: x, hash: 'sk-x-{HASH}'}},"
        f" {{name: y, hash: 'sk-y-{HASH}'}}]\n"
    )
    code, out = run("rm", "x", "-c", file)
    assert code == 2
    assert "by hand" in out
    file.write_text(
        f"models: [{{name: a, engine: echo}}]\nkeys:\n- &x\n  name: x\n  hash: sk-x-{HASH}\n"
        f"- <<: *x\n  name: y\n  hash: sk-y-{HASH}\n"
    )
    code, out = run("rm", "x", "-c", file)
    said = f"{file}: other lines use an anchor (&) of this key's; remove it by hand\n"
    assert (code, out) == (2, said)
