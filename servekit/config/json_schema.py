"""The configuration file as a JSON schema, for editors and `servekit schema`."""

from __future__ import annotations

from typing import Any

from servekit.config.engines import ENGINE_OPTIONS
from servekit.config.schema import Config, ModelConfig

Schema = dict[str, Any]


def json_schema() -> Schema:
    """Return the schema (draft 2020-12). `options` depends on `engine`, so editors complete it."""
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    for options in ENGINE_OPTIONS.values():
        definitions[options.__name__] = options.model_json_schema()
    definitions["ModelConfig"]["allOf"] = [_options_of(engine) for engine in ENGINE_OPTIONS]
    definitions["ModelConfig"]["properties"]["options"].pop("additionalProperties", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_tidy(schema),
        "title": "servekit configuration",
    }


def _options_of(engine: str) -> Schema:
    """If the engine is this one, `options` are its own; the default engine need not be written."""
    says: Schema = {"properties": {"engine": {"const": engine}}}
    if engine != ModelConfig.model_fields["engine"].default:
        says["required"] = ["engine"]
    target = {"$ref": f"#/$defs/{ENGINE_OPTIONS[engine].__name__}"}
    return {"if": says, "then": {"properties": {"options": target}}}


def _tidy(schema: Any) -> Any:
    """Drop the titles that pydantic makes up from the keys, and the line breaks of docstrings."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    tidy = {k: _tidy(v) for k, v in schema.items() if k != "title" or not isinstance(v, str)}
    if isinstance(text := tidy.get("description"), str):
        tidy["description"] = " ".join(text.split())
    return tidy
