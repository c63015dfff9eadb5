"""What gateways take for granted is what the file takes for granted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from servekit.config.base_model import Section
from servekit.config.sections.access import (
    BatchesConfig,
    FetchImagesConfig,
    KeyConfig,
    LimitsConfig,
    LoggingConfig,
    StoreResponsesConfig,
    TracingConfig,
)
from servekit.config.sections.mcp import McpServerConfig
from servekit.protocol.access import (
    AccessRules,
    BatchRules,
    ImageFetching,
    KeyRule,
    McpServer,
    RequestLimits,
    ResponseStorage,
    Tracing,
)


def defaults_of(kind: Any) -> dict[str, Any]:
    """Return the defaults of the fields that have one."""
    if issubclass(kind, msgspec.Struct):
        found = {field.name: field.default for field in msgspec.structs.fields(kind)}
        return {name: one for name, one in found.items() if one is not msgspec.NODEFAULT}
    return {
        name: field.default
        for name, field in kind.model_fields.items()
        if not field.is_required() and field.default_factory is None
    }


@pytest.mark.parametrize(
    ("told", "written", "differ"),
    [
        (RequestLimits, LimitsConfig, ()),
        (ImageFetching, FetchImagesConfig, ()),
        (Tracing, TracingConfig, ()),
        (McpServer, McpServerConfig, ("cwd", "url")),  # "" for none
        (KeyRule, KeyConfig, ("hash",)),
        # where the file has no such section, nothing is kept
        (ResponseStorage, StoreResponsesConfig, ("max_bytes",)),
        (BatchRules, BatchesConfig, ("max_bytes", "max_files", "max_batches", "concurrent")),
    ],
)
def test_defaults_are_those_of_the_file(
    told: type[msgspec.Struct], written: type[Section], differ: tuple[str, ...]
) -> None:
    """A gateway that knows no rules yet, or an older supervisor's, goes by its own."""
    here, there = defaults_of(told), defaults_of(written)
    shared = (here.keys() & there.keys()) - {*differ}
    assert shared
    assert {name: here[name] for name in shared} == {name: there[name] for name in shared}


def test_what_a_file_without_a_section_turns_off_is_off() -> None:
    rules = AccessRules()
    assert (rules.store_responses.max_bytes, rules.batches) == (0, BatchRules())
    assert set(defaults_of(BatchRules).values()) == {0, 30.0}
    assert (rules.fetch_images.hosts, rules.tracing.endpoint, rules.mcp) == ((), "", ())
    logging = defaults_of(LoggingConfig)
    assert (rules.log_requests, rules.log_prompts) == (logging["requests"], logging["prompts"])
