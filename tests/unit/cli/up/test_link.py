"""`servekit link`: the link alone is on stdout, for a script."""

from __future__ import annotations

from pathlib import Path

from servekit.protocol.messages import CreateLink, Link, Refused
from tests.unit.cli.instance import invoke, listening


def test_the_link_is_printed_with_its_life_beside_it(tmp_path: Path) -> None:
    with listening(tmp_path, lambda message: Link("http://a/ui?token=t", 3600.0)) as heard:
        done = invoke("link", run_dir=tmp_path)
    assert heard == [CreateLink()]
    assert (done.exit_code, done.stdout) == (0, "http://a/ui?token=t\n")
    assert done.stderr == "It may be opened once, within 60 minutes.\n"


def test_a_refusal_prints_no_link(tmp_path: Path) -> None:
    with listening(tmp_path, lambda message: Refused("there are no pages")):
        done = invoke("link", run_dir=tmp_path)
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "there are no pages\n")
