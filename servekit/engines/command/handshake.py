"""The handshake with a server: its model's name, whether it answers, and how answers continue.

A server that continues the last message of a chat is told from others by trial: the second half of
a greedy answer has to come again. Others ignore the parameters, and begin a new answer. So is a
model that takes images or recordings: one has to add to the tokens of the prompt.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from servekit.engines.remote.client import Endpoint
from servekit.engines.remote.errors import Refused
from servekit.engines.remote.handshake import EndpointFacts, find_context, list_models, try_traits
from servekit.engines.remote.reader import read_reply
from servekit.engines.remote.request_builder import EndpointTraits, build_call
from servekit.engines.remote.response_parser import ResponseParser
from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage, Generate, Media, SamplingParams
from servekit.protocol.types import Modality

#: In low precision one trial may fail by a near-tie.
_TRIALS = ("Count from one to twenty.", "Say the alphabet.")
_TRIAL_TOKENS = 12
_MOST_CHARS = 2**16
#: Statuses of a server or model without chats.
_NO_CHATS = (400, 404, 405, 422, 500, 501)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The result of a handshake."""

    greeted: EndpointFacts
    chats: bool
    continues_chats: bool  # from the text so far
    takes: tuple[Modality, ...] = ()


async def meet_server(endpoint: Endpoint, traits: EndpointTraits, task: str) -> ServerFacts:
    """Run the handshake. Raises Refused, or RequestError for an answer that is wrong.

    A server whose `task` is to answer forwarded requests only is not sent a greeting.
    """
    embeds = task == "embed"
    listed = [one for one in await list_models(endpoint) or [] if isinstance(one, dict)]
    names = [one["id"] for one in listed if isinstance(one.get("id"), str)]
    if names and traits.model not in names:
        traits = replace(traits, model=names[0])
    context = find_context(listed, traits.model)
    if task == "forward":
        return ServerFacts(
            EndpointFacts(traits, False, context, 0), chats=False, continues_chats=False
        )
    try:
        traits, size = await try_traits(endpoint, traits, embeds=embeds)
    except Refused as refusal:
        if embeds or refusal.status not in _NO_CHATS:
            raise
        await _send_request(
            endpoint, traits, Generate(0, SamplingParams(max_tokens=2), prompt=_TRIALS[0])
        )
        return ServerFacts(
            EndpointFacts(traits, False, context, 0), chats=False, continues_chats=False
        )
    for prompt in () if embeds else _TRIALS:
        if await _continues_chat(endpoint, traits, prompt):
            return ServerFacts(
                EndpointFacts(traits, False, context, size), chats=True, continues_chats=True
            )
    return ServerFacts(
        EndpointFacts(traits, False, context, size), not embeds, continues_chats=False
    )


async def _continues_chat(endpoint: Endpoint, traits: EndpointTraits, prompt: str) -> bool:
    params = SamplingParams(max_tokens=_TRIAL_TOKENS, temperature=0.0)
    asked = Generate(0, params, messages=[ChatMessage("user", prompt)])
    try:
        whole = await _send_request(endpoint, traits, asked)
        cut = whole.rfind(" ", 0, len(whole) // 2)  # where a token begins
        if not whole[: max(0, cut)].strip():
            return False
        rest = await _send_request(endpoint, traits, structs.replace(asked, answered=whole[:cut]))
    except (Refused, RequestError):
        return False
    return rest.startswith(whole[cut:])


async def find_modalities(
    endpoint: Endpoint, traits: EndpointTraits, tried: Sequence[Modality]
) -> list[Modality]:
    """Return which of the modalities add to the tokens of a chat's prompt."""
    probes = {"images": Media(_make_png(), "image/png"), "audio": Media(_make_wav(), "audio/wav")}
    return [one for one in tried if await _adds_tokens(probes[one], endpoint, traits)]


async def _adds_tokens(probe: Media, endpoint: Endpoint, traits: EndpointTraits) -> bool:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    tokens = []
    for media in ((), (probe,)):
        message = ChatMessage("user", "What is this?", media=media)
        try:
            answer = await _ask(endpoint, traits, Generate(0, params, messages=[message]))
        except (Refused, RequestError):
            return False
        tokens.append(answer.prompt_tokens)
    return tokens[1] > tokens[0]


def _make_png(size: int = 64) -> bytes:
    """Return a grey square, of a size that models with patches of 14 to 32 pixels take."""
    rows = zlib.compress((b"\0" + b"\x80" * 3 * size) * size)
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def _make_wav(rate: int = 16_000) -> bytes:
    """Return a second of a low tone."""
    wave = b"".join(struct.pack("<h", 8000 * (at // 40 % 2) - 4000) for at in range(rate))
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", len(wave)) + wave
    return b"RIFF" + struct.pack("<I", len(body)) + body


async def _send_request(endpoint: Endpoint, traits: EndpointTraits, request: Generate) -> str:
    """Return the text of the answer to one request."""
    return (await _ask(endpoint, traits, request)).piece(0).text


async def _ask(endpoint: Endpoint, traits: EndpointTraits, request: Generate) -> ResponseParser:
    """Return the answer to one request."""
    task = build_call(request, replace(traits, defaults={}))
    answer = ResponseParser(request, 0, _MOST_CHARS)
    async with endpoint.send_call(task, patient=False) as reply:
        await read_reply(reply, answer, lambda: None)
    return answer
