"""Errors: one line each for people, and what of them goes over the wire."""

from __future__ import annotations

import pytest

from servekit.errors import (
    LONGEST_MESSAGE,
    REQUEST_ERRORS,
    ConfigError,
    ForbiddenImport,
    LoadError,
    ModelNotFound,
    NobodyRuns,
    QueueFull,
    RequestError,
    ServekitError,
    StartError,
    describe_error,
    did_you_mean,
)

LONG = "x" * (LONGEST_MESSAGE + 1)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("wrong size\n  File a.cpp, line 3\n"), "ValueError: wrong size"),
        (ValueError("\n   \n  indented  \nmore"), "ValueError: indented"),
        (KeyError("name"), "KeyError: 'name'"),
        (MemoryError(), "MemoryError"),
        (LoadError("the file is gone.\nIt was here."), "the file is gone."),
        (LoadError(""), "LoadError"),
        (ServekitError(" \n "), "ServekitError"),
    ],
)
def test_an_error_is_one_line_and_only_others_have_their_type(error: Exception, line: str) -> None:
    assert describe_error(error) == line


@pytest.mark.parametrize("error", [ValueError(LONG), LoadError(LONG)])
def test_a_line_about_an_error_is_no_longer_than_a_message(error: Exception) -> None:
    line = describe_error(error)
    assert len(line) == LONGEST_MESSAGE
    assert line.endswith("xxx")


def test_a_message_to_a_client_ends_in_an_ellipsis_where_it_is_cut() -> None:
    whole = RequestError(LONG[:-1])
    assert whole.message == LONG[:-1], "as long as it may be"
    cut = RequestError(LONG)
    assert cut.message == str(cut) == "x" * (LONGEST_MESSAGE - 1) + "…"


def test_an_error_of_a_request_keeps_the_field_and_the_time() -> None:
    full = QueueFull("the queue is full", param="model", retry_after_s=2.5)
    assert (full.status, full.code) == (429, "queue_full")
    assert (full.param, full.retry_after_s) == ("model", 2.5)
    plain = RequestError("wrong")
    assert (plain.param, plain.retry_after_s) == (None, None)


def test_a_code_on_the_wire_stands_for_one_class_that_clients_may_see() -> None:
    assert REQUEST_ERRORS["invalid_request"] is RequestError
    assert REQUEST_ERRORS["model_not_found"] is ModelNotFound
    assert all(kind.code == code for code, kind in REQUEST_ERRORS.items())
    assert "internal_error" not in REQUEST_ERRORS and "load_error" not in REQUEST_ERRORS
    assert all(400 <= kind.status < 600 for kind in REQUEST_ERRORS.values())


def test_a_model_that_cannot_be_loaded_is_not_tried_again_unless_it_is_said() -> None:
    assert LoadError("no such file").permanent
    assert not LoadError("no memory now", permanent=False).permanent


def test_what_catches_a_kind_of_error_catches_its_special_cases() -> None:
    assert issubclass(NobodyRuns, StartError)
    assert issubclass(ForbiddenImport, ImportError), "code with an optional import goes on"
    assert not issubclass(ConfigError, StartError), "they have other exit codes"


def test_the_nearest_name_is_suggested() -> None:
    known = ["qwen3-4b", "qwen3-8b", "bge-m3"]
    assert did_you_mean("qwen3-4", known) == "; did you mean 'qwen3-4b'?"
    assert did_you_mean("llama", known) == ""
    assert did_you_mean("llama", []) == ""


def test_only_the_beginning_of_an_endless_name_is_compared() -> None:
    known = "a" * 128
    assert did_you_mean(known + "b" * 100_000, [known]) == f"; did you mean {known!r}?"
