"""Fingerprints, and how long they are held."""

from __future__ import annotations

import time

from msgspec.structs import replace

from servekit.errors import RequestQuarantined, SourceQuarantined
from servekit.gateway.http.request_context import RequestContext
from servekit.gateway.routing.failures.quarantine import Quarantine, fingerprint
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import (
    ChatMessage,
    ModelInfo,
    ModelStatus,
    Quarantined,
    SamplingParams,
)

PARAMS = SamplingParams(max_tokens=3, seed=1)
STATUS = ModelStatus("m", "echo", "-", 0, (), quarantine_s=60.0)


def ask(text: str = "x", params: SamplingParams = PARAMS, **who: object) -> InflightRequest:
    return InflightRequest("m", params, prompt=text, key=str(who.get("key", "")), stream=bool(who))


def test_a_fingerprint_is_of_what_is_asked_not_of_who_asks() -> None:
    mark = fingerprint("m", ask())
    assert mark == fingerprint("m", ask(key="another"))
    assert len(mark) == 64 and set(mark) <= set("0123456789abcdef")
    others = [
        fingerprint("n", ask()),
        fingerprint("m", ask("y")),
        fingerprint("m", ask(params=replace(PARAMS, seed=2))),
        fingerprint("m", InflightRequest("m", PARAMS, prompt=[120])),
        fingerprint("m", InflightRequest("m", PARAMS, messages=[ChatMessage("user", "x")])),
    ]
    assert len({mark, *others}) == 6


def test_it_holds_for_its_time_and_no_longer() -> None:
    quarantine = Quarantine()
    assert quarantine.error(STATUS, ask(), 0.0) is None
    entry = quarantine.commit(STATUS, ask(), 100.0)
    assert (entry.fingerprint, entry.model, entry.for_s) == (fingerprint("m", ask()), "m", 60.0)
    error = quarantine.error(STATUS, ask(key="another"), 130.0)
    assert isinstance(error, RequestQuarantined)
    assert "30 s" in error.message and entry.fingerprint[:16] in error.message
    assert quarantine.error(STATUS, ask("y"), 130.0) is None
    assert quarantine.error(STATUS, ask(), 160.0) is None


def test_what_others_have_found_is_held_too_and_forgotten_in_time() -> None:
    quarantine = Quarantine()
    mark = fingerprint("m", ask())
    quarantine.adopt_entries([Quarantined(mark, "m", 0.0, 50.0)], 0.0)
    quarantine.adopt_entries([Quarantined(mark, "m", 0.0, 20.0)], 0.0)
    assert quarantine.error(STATUS, ask(), 49.0) is not None
    quarantine.adopt_entries([], 51.0)
    assert not quarantine.held


def test_a_quarantine_of_no_time_is_none() -> None:
    quarantine = Quarantine()
    quarantine.commit(replace(STATUS, quarantine_s=0.0), ask(), 5.0)
    assert not quarantine.held


def test_another_generation_of_the_model_is_free_of_it() -> None:
    info = ModelInfo(100, 1, True, "x", "none", "cpu", generation="a.1")
    quarantine, old = Quarantine(), replace(STATUS, info=info)
    quarantine.commit(old, ask(), 0.0)
    assert quarantine.error(old, ask(), 1.0) is not None
    new = replace(STATUS, info=replace(info, generation="b.1"))
    assert quarantine.error(new, ask(), 1.0) is None


def test_what_differs_in_its_numbers_alone_is_refused_after_three_of_its_kind() -> None:
    quarantine = Quarantine()
    for number in range(3):
        assert quarantine.error(STATUS, ask(f"boom id{number}f"), 1.0) is None
        quarantine.commit(STATUS, ask(f"boom id{number}f"), float(number))
    error = quarantine.error(STATUS, ask("boom a77", replace(PARAMS, seed=9)), 3.0)
    assert isinstance(error, RequestQuarantined)
    assert "3 requests" in error.message and "57 s" in error.message
    assert quarantine.error(STATUS, ask("boom a 77"), 3.0) is None
    assert quarantine.error(STATUS, InflightRequest("m", PARAMS, prompt=[1, 2]), 3.0) is None
    assert quarantine.error(STATUS, ask("boom a77"), 60.0) is None


def test_nothing_is_refused_for_its_kind_where_one_of_them_has_come_through() -> None:
    quarantine = Quarantine()
    for number in range(3):
        quarantine.commit(STATUS, ask(f"boom {number}"), 0.0)
    assert quarantine.error(STATUS, ask("boom 7"), 1.0) is not None
    quarantine.clear_likeness("m", ask("boom 8"))
    assert quarantine.error(STATUS, ask("boom 7"), 1.0) is None
    assert quarantine.error(STATUS, ask("boom 1"), 1.0) is not None
    for number in range(3, 6):
        quarantine.commit(STATUS, ask(f"boom {number}"), 1.0)
    assert quarantine.error(STATUS, ask("boom 7"), 1.0) is None


def test_a_long_word_without_a_digit_takes_no_time_to_compare() -> None:
    quarantine = Quarantine()
    for number in range(3):
        quarantine.commit(STATUS, ask(f"boom {number}"), 0.0)
    began_s = time.process_time()
    assert quarantine.error(STATUS, ask("a" * 1_000_000), 1.0) is None
    assert time.process_time() - began_s < 1.0


def test_a_source_is_refused_with_the_time_to_wait() -> None:
    quarantine, call = Quarantine(), ask()
    call.origin = RequestContext({}, ("10.0.0.1", 5))
    entry = quarantine.commit_source(STATUS, "address:10.0.0.1", 30.0, 0.0)
    error = quarantine.error(STATUS, call, 10.0)
    assert isinstance(error, SourceQuarantined) and error.retry_after_s == 20.0
    assert "the address '10.0.0.1'" in error.message and "20 s" in error.message
    call.origin = RequestContext({}, ("10.0.0.2", 5))
    assert quarantine.error(STATUS, call, 10.0) is None
    assert entry.for_s == 30.0
