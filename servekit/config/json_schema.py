"""The JSON schema of the configuration file, for editors and `servekit schema`."""

from __future__ import annotations

from typing import Any

from servekit.config.engines import plugins
from servekit.config.engines.options import KINDS
from servekit.config.schema import Config, ModelConfig
from servekit.config.shorthands import COUNTS

Schema = dict[str, Any]


def json_schema() -> Schema:
    """Return the schema (draft 2020-12). `options` depends on `engine`, so editors complete it.

    Installed engine plugins are included.
    """
    schema = Config.model_json_schema()
    engines = [name for name in plugins.engine_names() if plugins.options_of(name) is not None]
    definitions = schema["$defs"]
    for engine in engines:
        options = KINDS[engine].options.model_json_schema()
        definitions |= options.pop("$defs", {})  # of mappings within them
        definitions[_options_title(engine)] = options
    model = definitions["ModelConfig"]
    model["allOf"] = [*(_options_of(engine) for engine in engines), _PATH_OF_AUTO]
    model["properties"]["engine"]["enum"] = ["auto", *engines]
    model["properties"]["options"].pop("additionalProperties", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_allow_shorthands(_tidy_schema(schema)),
        "title": "servekit configuration",
    }


#: A path may be missing beside a command that does not use it, which is checked when it is loaded.
_PATH_OF_AUTO: Schema = {
    "if": {"properties": {"engine": {"const": "auto"}}, "required": ["engine"]},
    "then": {
        "anyOf": [
            {"required": ["path"]},
            {"properties": {"options": {"required": ["command"]}}, "required": ["options"]},
        ]
    },
}


#: Texts that `shorthands` turns into numbers: "1h30m" and "4k".
_DURATION = r"^(([0-9]+(\.[0-9]*)?|\.[0-9]+)\s*(ns|us|µs|ms|min|s|m|h|d)\s*)+$"
_COUNT = r"^[0-9]+(\.[0-9]+)?\s*[kKmM]$"


def _allow_shorthands(schema: Any) -> Any:
    """Allow durations with a unit for keys in _s, and 4k for numbers of tokens."""
    if isinstance(schema, list):
        return [_allow_shorthands(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _allow_shorthands(value) for key, value in schema.items()}
    if isinstance(properties := found.get("properties"), dict):
        for key, value in properties.items():
            pattern = _DURATION if key.endswith("_s") else _COUNT if key in COUNTS else ""
            if pattern and _is_numeric(value):
                properties[key] = _or_text(value, pattern, "4k" if key in COUNTS else "5m")
    return found


def _is_numeric(schema: Schema) -> bool:
    kinds = [schema, *schema.get("anyOf", ())]
    return any(one.get("type") in ("number", "integer") for one in kinds)


def _or_text(schema: Schema, pattern: str, example: str) -> Schema:
    """Return the schema of a number that allows a text as well; its description stays outside."""
    outside: Schema = {key: schema[key] for key in ("description", "default") if key in schema}
    number = {key: value for key, value in schema.items() if key not in outside}
    text: Schema = {"type": "string", "pattern": pattern, "examples": [example]}
    return outside | {"anyOf": [number, text]}


def _options_of(engine: str) -> Schema:
    """Return the rule that binds `options` to this engine, and requires `path` where it does.

    The default engine may be omitted.
    """
    says: Schema = {"properties": {"engine": {"const": engine}}}
    if engine != ModelConfig.model_fields["engine"].default:
        says["required"] = ["engine"]
    target = {"$ref": f"#/$defs/{_options_title(engine)}"}
    then: Schema = {"properties": {"options": target}}
    if "nothing" not in KINDS[engine].formats:
        then["required"] = ["path"]
    return {"if": says, "then": then}


def _options_title(engine: str) -> str:
    """Return the title of an engine's options, with the engine's name for plugins."""
    name = KINDS[engine].options.__name__
    return name if plugins.find_plugin(engine) is None else f"{name}.{engine}"


def _tidy_schema(schema: Any) -> Any:
    """Drop the titles that pydantic derives from keys, and the line breaks of docstrings."""
    if isinstance(schema, list):
        return [_tidy_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    tidy = {k: _tidy_schema(v) for k, v in schema.items() if k != "title" or not isinstance(v, str)}
    if isinstance(text := tidy.get("description"), str):
        tidy["description"] = " ".join(text.split())
    return tidy
