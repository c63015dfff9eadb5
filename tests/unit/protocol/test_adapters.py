"""Messages about adapters and recordings: what a field means that an older peer does not send."""

from __future__ import annotations

from typing import Any

import msgspec

from servekit.protocol.adapters import (
    AdapterInfo,
    AdapterSpec,
    AdapterStatus,
    AddAdapter,
    GetAdapters,
)
from servekit.protocol.base import Message
from servekit.protocol.control.admin_messages import (
    Accepted,
    Link,
    Refused,
    Restart,
    Shutdown,
    Status,
)
from servekit.protocol.control.startup_messages import Phase, Start
from servekit.protocol.residency import KeepAlive, ModelDemand, ResidencyStatus, SetResidency
from servekit.protocol.speech import SpeechParams


def read(kind: Any, *fields: Any) -> Any:
    """Return what becomes of a value or message of which a peer sends only the first fields."""
    head = (kind.__name__,) if issubclass(kind, Message) else ()
    return msgspec.msgpack.decode(msgspec.msgpack.encode((*head, *fields)), type=kind)


def test_an_adapter_has_to_fit_its_base_unless_it_is_said() -> None:
    spec = read(AdapterSpec, "a", "/a")
    assert (spec.revision, spec.any_base) == (None, False)
    assert read(AddAdapter, "m", ["a", "/a"]) == AddAdapter("m", spec, in_place=False)
    assert read(GetAdapters).model == "", "those of all models"


def test_an_adapter_is_from_the_file_unless_it_is_said() -> None:
    status = read(AdapterStatus, "a", "/a", "serving")
    assert (status.from_file, status.reason, status.info, status.since) == (True, "", None, 0.0)
    info = read(AdapterInfo, "a", "LORA", "mixed", "it is small")
    assert (info.rank, info.parameters, info.bytes, info.virtual_tokens) == (0, 0, 0, 0)


def test_what_an_operator_leaves_out_is_done_with_care() -> None:
    assert not read(Shutdown).now, "requests are finished first"
    assert read(Restart, "m").wait and read(SetResidency, "m", "load").wait
    assert not read(KeepAlive, "m", 5.0).loads


def test_an_answer_says_no_more_than_it_has() -> None:
    refused = read(Refused, "no")
    assert (refused.invalid, refused.retry_after_s) == (False, 0.0)
    assert read(Accepted).message == ""
    assert read(Link, "http://x", 60.0).life_s == 60.0
    status = read(Status, "0.1", 1, "http://x", "/c", 0.0, 0, (), (), False)
    assert (status.starts, status.gpus, status.traffic) == ((), (), ())
    assert (status.profile, status.profiles) == ("", {}), "all models are served"


def test_a_model_that_comes_and_goes_stays_until_others_need_its_memory() -> None:
    status = read(ResidencyStatus, "on_demand", "resident")
    assert (status.stays_s, status.leaves_in_s, status.waiting, status.idle_s) == (None, None, 0, 0)
    assert read(ModelDemand, "m", 1, 2).idle_s == 0.0


def test_a_phase_goes_on_until_its_end_is_told() -> None:
    phase = read(Phase, "load", 1.0)
    assert (phase.ended_s, phase.within, phase.failed, phase.why) == (None, "", False, "")
    assert read(Start, "up", 0.0, "up", (), 1.0).first_token_s is None


def test_a_recording_is_written_in_its_own_language_without_times() -> None:
    params = read(SpeechParams, 3)
    assert (params.language, params.translate, params.timestamps) == ("", False, "")
