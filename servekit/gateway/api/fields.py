"""Descriptions of the fields of bodies: what the OpenAPI document tells beyond a field's type.

A text stands at the field: in its type as `Annotated[str, doc("…")]`, or below it as a docstring
where it is longer. Types that several fields share carry their text with them. msgspec reads the
bounds of an annotation once, when it makes a decoder, and skips the rest.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

#: The model and the conversation of all examples.
MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def doc(description: str, *examples: Any, **bounds: Any) -> Meta:
    """Describe a field, and set bounds such as `ge` and `max_length`.

    The document's example of a body has the first of the field's `examples`.
    """
    return Meta(description=description, examples=list(examples) or None, **bounds)


def unserved(*harmless: Any, instead: str = "") -> Meta:
    """Mark a parameter that is refused by name, unless it is null or has a `harmless` value."""
    values = (None, *harmless)
    return Meta(
        description=f"Not supported; {instead}" if instead else "Not supported",
        extra_json_schema={"enum": list(values)},
        extra={"harmless": values, "instead": instead or "leave it out"},
    )


# ---- requests

#: Accepted from clients that always send it.
Ignored = Annotated[Any, doc("Has no effect")]
ModelName = Annotated[
    str, doc("A model's name or alias; without it `server.default_model`, else the first", MODEL)
]
EmbeddingModel = Annotated[ModelName, Meta(examples=["bge-small"])]
Stream = Annotated[bool, doc("Send the answer in pieces, as it is generated")]
ROLE = doc("The speaker; `developer` is treated as `system`", "user")
CONTENT = doc("Text, or parts: text, and images for models that take them", QUESTION)
TOOLS = doc("Functions that the model may call; names have 1 to 64 letters, digits, _ or -")
Tools = Annotated[list[dict[str, Any]], TOOLS, Meta(max_length=1024)]
DESCRIPTION = doc("A description for the model, if its template shows it")
#: The description of a JSON schema that constrains an answer.
SCHEMA = doc(
    "A JSON schema, nested no deeper than `server.limits.schema_depth` allows. The `format`s"
    " date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid and uri are enforced; any"
    " other is an annotation"
)
FORM = doc("The form of the answer, enforced token by token")

# ---- responses

UnixTime = Annotated[int, doc("Unix time, s", 1795262400)]
IsoTime = Annotated[str, doc("Time in ISO 8601, UTC", "2026-11-21T12:00:00Z")]
Answering = Annotated[str, doc("The name of the model that answered", MODEL)]
Index = Annotated[int, doc("Position in the list")]
Text = Annotated[str, doc("The text", ANSWER)]
Thoughts = Annotated[str, doc("The thoughts of a model that thinks")]
PromptTokens = Annotated[int, doc("Tokens of the prompt, with those of the chat template", 37)]
AnswerTokens = Annotated[
    int, doc("Tokens generated, with thoughts and with a stop string that was cut off", 8)
]
TotalTokens = Annotated[int, doc("Tokens of the prompt and of the answer", 45)]
CachedTokens = Annotated[int, doc("Tokens of the prompt that were in the engine's prefix cache")]
FunctionName = Annotated[str, doc("The name of the function")]
Arguments = Annotated[str, doc("The text of a JSON object, as the model wrote it")]
#: The message of an error.
Problem = Annotated[
    str, doc("A sentence that says what to do about it", "temperature: expected `float` <= 2.0")
]
