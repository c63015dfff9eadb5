"""Questions of the engine's own; vLLM itself is not needed."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.engines.vllm import probes
from servekit.errors import LoadError
from tests.unit.engines.vllm.recording import RecordingCore


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> RecordingCore:
    monkeypatch.setattr(probes, "make_request", lambda name, prompt, lora, **params: name)
    return RecordingCore()


def test_what_is_not_answered_in_time_is_aborted(core: RecordingCore) -> None:
    taken: Any = core
    with pytest.raises(LoadError, match="did not answer"):
        probes.Probes(taken, patience_s=0.01)._ask_core([1], None)
    assert core.aborted == core.added == ["probe#0"]
