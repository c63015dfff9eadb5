"""The table of loaded adapters: each once, by name, and what has been refused."""

from __future__ import annotations

import pytest

from servekit.engines.api.adapter_table import AdapterTable
from servekit.errors import LoadError, RequestError
from servekit.protocol.adapters import AdapterInfo, AdapterSpec


class Table(AdapterTable[str]):
    """Loads whatever is not called bad or busy."""

    def _load_new(self, spec: AdapterSpec) -> AdapterInfo:
        if spec.name == "bad":
            raise LoadError("its base is another", permanent=True)
        if spec.name == "busy":
            raise LoadError("no memory now", permanent=False)
        self._served[spec.name] = spec.path
        return AdapterInfo(spec.name, "LORA", "mixed", "")


def test_a_loaded_adapter_is_found_by_its_name() -> None:
    table = Table()
    assert table.load(AdapterSpec("poet", "/poet")).name == "poet"
    assert table.get("poet") == "/poet"
    with pytest.raises(RequestError) as error:
        table.get("cook")
    assert (error.value.message, error.value.param) == (
        "This model has no adapter 'cook'.",
        "model",
    )


def test_a_name_is_taken_until_it_is_unloaded() -> None:
    table = Table()
    table.load(AdapterSpec("poet", "/poet"))
    with pytest.raises(RequestError, match=r"^An adapter 'poet' is loaded already; unload it fir"):
        table.load(AdapterSpec("poet", "/other"))
    assert table.get("poet") == "/poet"


def test_only_what_would_fail_again_is_the_clients_error() -> None:
    with pytest.raises(RequestError) as error:
        Table().load(AdapterSpec("bad", "/bad"))
    assert (error.value.message, error.value.param) == ("its base is another", "lora_path")
    with pytest.raises(LoadError, match="no memory now"):
        Table().load(AdapterSpec("busy", "/busy"))


def test_at_a_start_one_that_fails_does_not_keep_the_others_away() -> None:
    names = ("a", "bad", "busy", "b", "a")
    infos, refused = Table().load_all(AdapterSpec(name, f"/{name}") for name in names)
    assert [info.name for info in infos] == ["a", "b"]
    assert refused["bad"] == "its base is another" and refused["busy"] == "no memory now"
    assert refused["a"].startswith("An adapter 'a' is loaded already")
