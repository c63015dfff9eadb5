"""Fingerprints, and how long they are held."""

from __future__ import annotations

from msgspec.structs import replace

from servekit.errors import RequestQuarantined
from servekit.gateway.call import Call
from servekit.gateway.quarantine import Quarantine, fingerprint
from servekit.wire.messages import ChatMessage, ModelStatus, Quarantined, SamplingParams

PARAMS = SamplingParams(max_tokens=3, seed=1)
STATUS = ModelStatus("m", "echo", "-", 0, (), quarantine_s=60.0)


def ask(text: str = "x", params: SamplingParams = PARAMS, **who: object) -> Call:
    return Call("m", params, prompt=text, key=str(who.get("key", "")), stream=bool(who))


def test_a_fingerprint_is_of_what_is_asked_not_of_who_asks() -> None:
    mark = fingerprint("m", ask())
    assert mark == fingerprint("m", ask(key="another"))
    assert len(mark) == 64 and set(mark) <= set("0123456789abcdef")
    others = [
        fingerprint("n", ask()),
        fingerprint("m", ask("y")),
        fingerprint("m", ask(params=replace(PARAMS, seed=2))),
        fingerprint("m", Call("m", PARAMS, prompt=[120])),
        fingerprint("m", Call("m", PARAMS, messages=[ChatMessage("user", "x")])),
    ]
    assert len({mark, *others}) == 6


def test_it_holds_for_its_time_and_no_longer() -> None:
    quarantine = Quarantine()
    assert quarantine.error("m", ask(), 0.0) is None
    entry = quarantine.commit(STATUS, ask(), 100.0)
    assert entry == Quarantined(fingerprint("m", ask()), "m", 160.0)
    error = quarantine.error("m", ask(key="another"), 130.0)
    assert isinstance(error, RequestQuarantined)
    assert "30 s" in error.message and entry.fingerprint[:16] in error.message
    assert quarantine.error("m", ask("y"), 130.0) is None
    assert quarantine.error("m", ask(), 160.0) is None


def test_what_others_have_found_is_held_too_and_forgotten_in_time() -> None:
    quarantine = Quarantine()
    mark = fingerprint("m", ask())
    quarantine.add([Quarantined(mark, "m", 50.0)], 0.0)
    quarantine.add([Quarantined(mark, "m", 20.0)], 0.0)
    assert quarantine.error("m", ask(), 49.0) is not None
    quarantine.add([], 51.0)
    assert not quarantine


def test_a_quarantine_of_no_time_is_none() -> None:
    quarantine = Quarantine()
    quarantine.commit(replace(STATUS, quarantine_s=0.0), ask(), 5.0)
    assert not quarantine
