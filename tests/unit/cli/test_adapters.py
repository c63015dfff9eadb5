"""`servekit adapter add`, `rm` and `ls`: what they ask an instance, and what they print."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from servekit.protocol.adapters import (
    AdapterInfo,
    Adapters,
    AdapterSpec,
    AdapterStatus,
    AddAdapter,
    GetAdapters,
    RemoveAdapter,
)
from servekit.protocol.messages import Accepted, Refused, ToSupervisor
from tests.unit.cli.instance import invoke, listening

INFO = AdapterInfo("poet", "LORA", "grouped", "its layers are its own.", bytes=3 * 2**20)


def accept(message: ToSupervisor) -> Accepted:
    return Accepted("poet serves")


def test_options_of_add_reach_the_instance(tmp_path: Path) -> None:
    with listening(tmp_path, accept) as heard:
        done = invoke("adapter", "add", "poet", "org/poet", run_dir=tmp_path)
        options = ("-m", "base", "--revision", "v2", "--in-place", "--any-base")
        invoke("adapter", "add", "poet", "org/poet", *options, run_dir=tmp_path)
    assert (done.exit_code, done.stdout) == (0, "poet serves\n")
    assert heard == [
        AddAdapter("", AdapterSpec("poet", "org/poet")),
        AddAdapter("base", AdapterSpec("poet", "org/poet", "v2", any_base=True), in_place=True),
    ]


def test_a_folder_is_sent_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    (tmp_path / "folder").mkdir()
    with listening(tmp_path, accept) as heard:
        for path in ("folder", "./absent", "~/absent", "/absent", "absent"):
            invoke("adapter", "add", "poet", path, run_dir=tmp_path)
    sent = [one.adapter.path for one in heard if isinstance(one, AddAdapter)]
    here = str(tmp_path)
    assert sent == [
        *(f"{here}/folder", f"{here}/absent", "/home/somebody/absent", "/absent"),
        "absent",  # nothing has that name here: a hub id
    ]


def test_a_name_that_is_taken_is_told_with_the_option(tmp_path: Path) -> None:
    said = "poet is loaded; set 'load_inplace' to True to replace it"
    with listening(tmp_path, lambda message: Refused(said, invalid=True)):
        done = invoke("adapter", "add", "poet", "org/poet", run_dir=tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "poet is loaded; say --in-place to replace it\n"


def test_rm_names_the_adapter(tmp_path: Path) -> None:
    with listening(tmp_path, lambda message: Accepted("poet is gone")) as heard:
        done = invoke("adapter", "rm", "poet", run_dir=tmp_path)
    assert (done.stdout, heard) == ("poet is gone\n", [RemoveAdapter("poet")])


def test_ls_shows_how_each_runs_or_why_it_does_not(tmp_path: Path) -> None:
    now = time.time()
    found = (
        AdapterStatus("poet", "/poet", "serving", info=INFO, since=now - 90),
        AdapterStatus("cook", "/cook", "failed", "its rank is 0", since=now - 5),
        AdapterStatus("bard", "/bard", "loading", since=now),
    )
    with listening(tmp_path, lambda message: Adapters({"m": found})) as heard:
        done = invoke("adapter", "ls", run_dir=tmp_path)
        as_json = invoke("adapter", "ls", "-m", "m", "--json", run_dir=tmp_path)
    assert heard == [GetAdapters(), GetAdapters("m")]
    head, poet, cook, bard = done.stdout.splitlines()
    columns = ["ADAPTER", "STATE", "MODEL", "KIND", "MODE", "SIZE", "SINCE", "NOTE"]
    assert head.split() == columns
    assert poet.split()[:5] == ["poet", "serving", "m", "LORA", "grouped"]
    assert "3 MiB" in poet and poet.rstrip().endswith("its layers are its own")
    assert cook.split()[:6] == ["cook", "failed", "m", "-", "-", "-"]
    assert cook.rstrip().endswith("its rank is 0") and bard.rstrip().endswith("/bard")
    told = json.loads(as_json.stdout)["m"]
    assert [one["name"] for one in told] == ["poet", "cook", "bard"]
    assert told[0]["info"]["bytes"] == 3 * 2**20
