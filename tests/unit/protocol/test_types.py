"""What types within messages work out, and what a field means that an older peer does not send."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest

from servekit.protocol.access import AccessRules, McpServer
from servekit.protocol.messages import (
    ChatMessage,
    Delta,
    Media,
    ModelInfo,
    ModelStatus,
    Preset,
    ReplicaStatus,
)
from servekit.protocol.residency import Residency, tier_text
from servekit.protocol.speech import SpokenSegment, Transcript
from servekit.protocol.types import as_builtins

INFO = ModelInfo(10, 1, True, "a", "float32", "cpu", parameters=1000)


def read(kind: Any, *fields: Any) -> Any:
    """Return what becomes of a value of which a peer sends only the first fields."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=kind)


def test_a_model_of_an_older_worker_generates_and_goes_on_with_the_tokens_of_others() -> None:
    info = read(ModelInfo, 10, 1, True, "a", "float32", "cpu")
    assert (info.resumes, info.serves, info.sleeps) == (True, ("generate",), False)
    assert (info.dialect.tools, info.adapters, info.prefix_block) == ("", (), 0)


def test_a_model_of_an_older_supervisor_is_loaded_at_the_start_and_stays() -> None:
    status = read(ModelStatus, "m", "echo", "-", 0, ())
    assert (status.residence, status.scale, status.changing) == (None, None, False)
    assert (status.routing, status.endpoints, status.left_out) == ("auto", (), "")
    assert (status.timeout_s, status.max_queue) == (600.0, 1024)


def test_rules_of_an_older_supervisor_allow_no_more_than_they_say() -> None:
    rules = read(AccessRules)
    assert (rules.runtime_adapters, rules.open_metrics, rules.browser_link) == (False,) * 3
    assert (rules.store_responses.max_bytes, rules.batches.max_bytes) == (0, 0)
    assert (rules.fetch_images.hosts, rules.fetch_images.private_addresses) == ((), False)
    assert (rules.log_prompts, rules.log_requests, rules.tracing.endpoint) == (False, True, "")
    assert rules.unknown_parameters == "warn"
    server = read(McpServer, "tools")
    assert (server.start_timeout_s, server.call_timeout_s, server.idle_s) == (30.0, 60.0, 600.0)


def test_a_delta_of_an_older_worker_has_a_text_and_nothing_else() -> None:
    delta = read(Delta, 1, "a")
    assert (delta.finish, delta.stop, delta.stop_token, delta.http) == (None, "", -1, None)
    assert read(Transcript, ()).repeats
    assert read(SpokenSegment, "a", 0.0, 1.0).compression == 1.0


@pytest.mark.parametrize(
    ("kind", "modality"),
    [("audio/wav", "audio"), ("image/png", "images"), ("", "images"), ("video/mp4", "images")],
)
def test_a_file_is_a_recording_or_an_image_by_its_kind(kind: str, modality: str) -> None:
    assert Media(b"data", kind).modality == modality


def test_the_content_of_a_file_is_in_no_log() -> None:
    assert repr(Media(b"secret", "image/png", 3)) == "Media(image/png, 6 bytes)"


def test_the_parts_of_a_message_come_in_their_order() -> None:
    first, second = Media(b"1", "image/png", 2), Media(b"2", "audio/wav", 2)
    assert ChatMessage("user", "abcd", media=(first, second)).parts == ["ab", first, second, "cd"]
    begins, ends = Media(b"1", "image/png", 0), Media(b"2", "image/png", 4)
    assert ChatMessage("user", "abcd", media=(begins, ends)).parts == [begins, "abcd", ends]
    assert ChatMessage("user", "").parts == []


@pytest.mark.parametrize(("dtype", "size_bytes"), [("float32", 4000), ("bfloat16", 2000)])
def test_weights_are_as_large_as_their_numbers_unless_it_is_said(
    dtype: str, size_bytes: int
) -> None:
    info = msgspec.structs.replace(INFO, dtype=dtype)
    assert info.size_bytes == size_bytes
    assert msgspec.structs.replace(info, weights_bytes=7).size_bytes == 7
    assert msgspec.structs.replace(info, parameters=0).size_bytes == 0


def test_a_model_has_the_names_of_its_aliases_and_presets_too() -> None:
    presets = (Preset("p", {}), Preset("q", {"top_p": 0.5}))
    status = ModelStatus("m", "echo", "-", 0, (), aliases=("a",), presets=presets)
    assert status.names == ("m", "a", "p", "q")


def test_structs_are_objects_by_the_names_of_their_fields() -> None:
    replica = ReplicaStatus("m/0", "ready", "/s", 1, "cpu", timings_s={"load": 1.5})
    told = as_builtins({"models": (ModelStatus("m", "echo", "-", 0, (replica,), INFO),)})
    [model] = told["models"]
    assert model["replicas"][0]["timings_s"] == {"load": 1.5}
    assert model["info"]["dialect"]["tools"] == ""
    json.dumps(told)


@pytest.mark.parametrize("tier", get_args(Residency))
def test_every_tier_has_a_word_for_people(tier: Residency) -> None:
    words = {"resident": "loaded", "coming": "loading", "leaving": "unloading"}
    assert tier_text(tier) == words.get(tier, tier)
