"""Token ids of the inputs of a request to embed, classify or score, cut only if it says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import chain
from typing import TypeVar

from servekit.engines.api.base import Engine, PairCodec, TokenizedText, TooManyTokens
from servekit.errors import ContextLengthExceeded, RequestError, Unsupported
from servekit.protocol.messages import Generate, ModelInfo, PoolingParams
from servekit.protocol.tasks import explain_no_instruction

#: Maximum number of tokens of a text that is to be cut.
MOST_TOKENS = 2**20
#: A text with at most this many characters per token of the limit is tokenised at once.
_CHARS = 16
_PLAIN = PoolingParams()
#: Inputs that one thread encodes at a time.
_PART = 4
Made = TypeVar("Made")


class InputEncoder:
    """An encoder of inputs for one engine. Raises RequestError for inputs that do not fit."""

    def __init__(self, engine: Engine, info: ModelInfo, threads: Executor | None = None) -> None:
        """`threads` help with the inputs of a request that is not encoded in one of them."""
        self._threads = threads
        self._engine = engine
        self._context = info.max_context
        self._instructs = "instruction" in info.serves

    def encode_input(
        self, request: Generate, *, spread: bool = False
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ids of each input, and for pairs of texts the type of each of these ids.

        With `spread` other threads encode some of them.
        """
        if not request.inputs:
            raise RequestError("there is no input", param="input")
        if request.task == "score":
            self._check_instruction(request)
            pairs = _pairs_of(request)
            found = self._map(
                lambda at: self._encode_pair(request, at, *pairs[at]), len(pairs), spread
            )
            types = [types for _, types in found]
            return [ids for ids, _ in found], types if all(types) else []
        inputs = request.inputs
        return self._map(
            lambda at: self._encode_text(request, at, inputs[at]), len(inputs), spread
        ), []

    def _map(self, encode: Callable[[int], Made], count: int, spread: bool) -> list[Made]:
        """Return what `encode` makes of the numbers below `count`."""
        if not spread or self._threads is None or count < 2 * _PART:
            return [encode(at) for at in range(count)]

        def encode_part(first: int) -> list[Made]:
            return [encode(at) for at in range(first, min(count, first + _PART))]

        # the first part that fails is the first that is told
        return [*chain.from_iterable(self._threads.map(encode_part, range(0, count, _PART)))]

    def _encode_text(self, request: Generate, at: int, one: str | list[int]) -> list[int]:
        asked = request.pooling or _PLAIN
        total = self._total(request)
        if isinstance(one, str) and (total or asked.input_tokens):
            self._check_text(request, at, one, MOST_TOKENS)
            tokenized = self._encode_parts(one)
            ids = self._cut(tokenized, asked.input_tokens, 0, total).ids
        elif isinstance(one, str):
            try:
                ids = self._engine.codec.encode(one, self._context)
            except TooManyTokens as error:
                raise self._too_long(request, at, f"more than {error.count}") from None
        else:
            ids = one[: min(total or len(one), asked.input_tokens or len(one))]
        if not ids:
            raise RequestError(f"{_name(request, at)} is empty", param=asked.name)
        self.check_ids(ids, asked.name)
        if len(ids) > self._context:
            raise self._too_long(request, at, str(len(ids)))
        return ids

    def _encode_pair(
        self, request: Generate, at: int, query: str, document: str
    ) -> tuple[list[int], list[int]]:
        asked = request.pooling or _PLAIN
        total = self._total(request)
        limit = MOST_TOKENS if total else self._context
        self._check_text(request, at, query, limit)
        self._check_text(request, at, document, MOST_TOKENS if asked.input_tokens else limit)
        pair = self._encode_parts(query, document, asked.instruction)
        if total or asked.input_tokens:
            pair = self._cut(pair, 0, asked.input_tokens, total)
        if not pair.ids:
            raise RequestError(f"{_name(request, at)} is empty", param=asked.name)
        if len(pair.ids) > self._context:
            raise self._too_long(request, at, str(len(pair.ids)))
        return pair.ids, pair.types

    def _total(self, request: Generate) -> int:
        """Return the tokens that an input is cut to; 0: it is not cut."""
        asked = request.params.truncate_prompt
        return min(asked, self._context) if asked > 0 else -asked * self._context

    def _check_text(self, request: Generate, at: int, text: str, limit: int) -> None:
        """Raise ContextLengthExceeded for a text that is far too long, before all is tokenised."""
        if len(text) > _CHARS * limit:
            try:
                self._engine.codec.encode(text, limit)
            except TooManyTokens as error:
                raise self._too_long(request, at, f"more than {error.count}") from None

    def _check_instruction(self, request: Generate) -> None:
        """Raise RequestError for an instruction that is too long, or that the prompt lacks."""
        told = (request.pooling or _PLAIN).instruction
        if not told:
            return
        if not self._instructs:
            sentence = explain_no_instruction(self._engine.spec.model)
            raise Unsupported(sentence, param="instruction")
        try:
            ids = self._engine.codec.encode(told, self._context)
        except TooManyTokens as error:
            tokens: int = error.count
        else:
            tokens = len(ids)
        if tokens > self._context:
            raise ContextLengthExceeded(
                f"instruction has {tokens} tokens or more, and this model reads at most"
                f" {self._context}. Shorten it",
                param="instruction",
            )

    def _encode_parts(
        self, text: str, second: str | None = None, instruction: str = ""
    ) -> TokenizedText:
        codec = self._engine.codec
        if isinstance(codec, PairCodec):
            return codec.encode_parts(text, second, instruction)
        if second is not None:
            raise Unsupported("this model's tokenizer reads no pairs of texts", param="model")
        return TokenizedText(codec.encode(text), [], [])

    def _cut(self, text: TokenizedText, first: int, second: int, total: int) -> TokenizedText:
        if text.ids and not text.parts:
            raise Unsupported(
                "truncate_prompt_tokens, max_tokens_per_doc: this model's tokenizer cannot cut",
                param="truncate_prompt_tokens",
            )
        return cut_text(text, first, second, total)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise RequestError if an id is not in the vocabulary."""
        size = self._engine.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            raise RequestError(f"token ids must be between 0 and {size - 1}", param=param)

    def _too_long(self, request: Generate, at: int, tokens: str) -> ContextLengthExceeded:
        paired = " with its query" if request.task == "score" else ""
        cut = "" if request.pooling is None else ", or have it cut by truncate_prompt_tokens: -1"
        return ContextLengthExceeded(
            f"{_name(request, at)}{paired} has {tokens} tokens, and this model reads at most"
            f" {self._context}. Shorten it{cut}",
            param=(request.pooling or _PLAIN).name,
        )


def cut_text(text: TokenizedText, first: int, second: int, total: int) -> TokenizedText:
    """Cut a text or a pair of texts at their ends; special tokens stay.

    `first` and `second` are the most tokens of each text, `total` is that of both with the special
    tokens; 0 is no limit. For the total, the longer text is cut first, as tokenizers do. Raises
    RequestError if no token of a text would be left.
    """
    kept = [text.parts.count(1), text.parts.count(2)]
    special = len(text.parts) - sum(kept)
    kept = [min(count, most or count) for count, most in zip(kept, (first, second), strict=True)]
    if total and special + sum(kept) > total:
        if total <= special:
            raise RequestError(
                f"truncate_prompt_tokens: {total} leaves no room for text beside {special} special"
                " tokens",
                param="truncate_prompt_tokens",
            )
        kept = _shorten_longest(kept, total - special)
    places, left = [], [len(text.ids), *kept]
    for place, part in enumerate(text.parts):
        if left[part]:
            left[part] -= 1
            places.append(place)
    return TokenizedText(
        [text.ids[place] for place in places],
        [text.types[place] for place in places] if text.types else [],
        [text.parts[place] for place in places],
    )


def _shorten_longest(counts: list[int], room: int) -> list[int]:
    """Return how many tokens of two texts are kept, together `room`, as in Hugging Face's cut."""
    shorter = min(counts)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter = room // 2
        longer = room - shorter
    return [longer, shorter] if counts[0] > counts[1] else [shorter, longer]


def _pairs_of(request: Generate) -> list[tuple[str, str]]:
    """Return the pairs of query and document. Raises RequestError if they do not match."""
    documents = [one for one in request.inputs if isinstance(one, str)]
    queries = request.queries * (len(documents) if len(request.queries) == 1 else 1)
    if len(documents) != len(request.inputs) or len(queries) != len(documents):
        raise RequestError("queries and documents must be texts, as many of each", param="queries")
    return list(zip(queries, documents, strict=True))


def _name(request: Generate, at: int) -> str:
    asked = request.pooling or _PLAIN
    place = at + asked.first
    return f"{asked.name}[{place}]" if len(request.inputs) > 1 or place else asked.name
