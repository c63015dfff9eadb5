"""Token ids of texts by the fastest library that gives the tokenizer's own ids.

`fastokens` takes a tenth of the time of `tokenizers` or less, and reads some tokenizers only;
`tokenizers` alone is faster than by way of `transformers`. A library is used once it has given the
ids of `transformers` for a corpus of odd texts and all added tokens.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import structlog

from servekit.engines.api.base import TokenizedText
from servekit.engines.text.probe_texts import make_probe_texts
from servekit.engines.text.segment_cache import SegmentCache, safe_borders
from servekit.errors import describe_error

log: Any = structlog.get_logger(__name__)

#: Returns token ids; with True the tokens of a text's beginning and end are added.
Encode = Callable[[str, bool], list[int]]
#: Returns the tokens of a text, or of a pair of texts, with the special tokens around them.
EncodePair = Callable[[str, str | None], TokenizedText]
#: A text, whether tokens are added at its beginning and end, and its ids.
_Probe = tuple[str, bool, list[int]]

#: Longest text in characters to tokenise on an event loop, by library: about 0.2 ms of work.
QUICK_CHARS = {"fastokens": 4096, "tokenizers": 256, "transformers": 256}
#: Memory that fastokens may use for parts of earlier texts.
CACHE_BYTES = 16 * 2**20
#: Pairs of odd texts by which `tokenizers` is proved for pairs.
_PAIRS = 60


class TextEncoder:
    """The encoder of a `transformers` tokenizer; `library` is the library in use.

    It begins with transformers. `reserve` is the encoder for texts that fastokens refuses. Any
    thread may use it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.reserve: Encode = self._encode_by_transformers
        self.encode: Encode = self.reserve
        self.library = "transformers"
        self.encode_pair: EncodePair = self._encode_pair_by_transformers

    @property
    def quick_chars(self) -> int:
        return QUICK_CHARS[self.library]

    def start_proof(self) -> None:
        """Prove the faster libraries in a thread, and change to the fastest as soon as possible."""
        threading.Thread(target=self.prove_libraries, name="tokenizer", daemon=True).start()

    def prove_libraries(self) -> None:
        """Change to the fastest library that gives the tokenizer's own ids, if any does."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return  # written in Python
        try:
            probes = list(self._probe(backend))
        except Exception as error:
            log.warning("tokenizer_library_unused", library="tokenizers", reason=str(error))
            return
        if self._prove("tokenizers", lambda: self._by_tokenizers(backend), probes):
            self.reserve = self.encode
            self._prove_pairs(backend)
            self._prove("fastokens", lambda: self._by_fastokens(backend), probes)
        log.info("tokenizer_library_used", library=self.library)

    def _prove(self, library: str, make: Callable[[], Encode], probes: list[_Probe]) -> bool:
        try:
            encode = make()
            for text, special, ids in probes:
                if encode(text, special) != ids:
                    raise ValueError(f"it gives other ids for {text[:60]!r}")
        except ImportError:
            return False
        except BaseException as error:
            _check_is_fault(error)
            log.info("tokenizer_library_unused", library=library, reason=describe_error(error))
            return False
        self.encode, self.library = encode, library
        return True

    def _prove_pairs(self, backend: Any) -> None:
        """Encode pairs by `tokenizers`, which lets other threads run, if that gives the same."""
        has_types = bool(self._encode_pair_by_transformers("a", "b").types)

        def encode(text: str, second: str | None) -> TokenizedText:
            (found,) = backend.encode_batch([text if second is None else (text, second)])
            return _read_tokenized(
                found.ids, found.type_ids if has_types else (), found.sequence_ids
            )

        texts = [*islice(make_probe_texts(()), _PAIRS)]
        pairs = [*zip(texts, [*reversed(texts[1:]), None], strict=True), ("a", ""), ("", "a")]
        try:
            equal = all(encode(*pair) == self._encode_pair_by_transformers(*pair) for pair in pairs)
        except Exception:  # such as of a tokenizer that joins no texts
            return
        if equal:
            self.encode_pair = encode

    def _probe(self, backend: Any) -> Iterator[_Probe]:
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        for text in make_probe_texts(added):
            for special in (False, True):
                yield text, special, self._encode_by_transformers(text, special)

    def _encode_by_transformers(self, text: str, special: bool) -> list[int]:
        tokenized = self._tokenizer(
            text, add_special_tokens=special, return_attention_mask=False, verbose=False
        )
        return list(tokenized["input_ids"])

    def _encode_pair_by_transformers(self, text: str, second: str | None) -> TokenizedText:
        # as a batch: the library takes an empty second text of a single pair for none at all
        pair = [text], None if second is None else [second]
        tokenized = self._tokenizer(*pair, return_attention_mask=False)
        [ids], [types] = tokenized["input_ids"], tokenized.get("token_type_ids") or [()]
        if not getattr(tokenized, "is_fast", False):
            return TokenizedText(list(ids), list(types), [])
        return _read_tokenized(ids, types, tokenized.sequence_ids(0))

    def _by_tokenizers(self, backend: Any) -> Encode:
        def encode_exactly(text: str, special: bool) -> list[int]:
            (tokenized,) = backend.encode_batch_fast([text], add_special_tokens=special)
            return list(tokenized.ids)

        borders = self._list_borders(backend)
        if not borders:
            return encode_exactly
        cache = SegmentCache(lambda text: encode_exactly(text, False), borders)
        return lambda text, special: (
            encode_exactly(text, True) if special else cache.encode_segments(text)
        )

    def _list_borders(self, backend: Any) -> list[str]:
        """Return the added tokens of the chat template at which texts may be cut."""
        if backend.encode_special_tokens:  # special tokens are read as text
            return []
        template = str(getattr(self._tokenizer, "chat_template", None) or "")
        named = [token for token in self._tokenizer.special_tokens_map.values() if template]
        added = backend.get_added_tokens_decoder().values()
        return safe_borders(added, lambda token: token in template or token in named)

    def _by_fastokens(self, backend: Any) -> Encode:
        import fastokens

        # Its own threads, which poll for a while after each text, cost more than they save.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        fast = fastokens.Tokenizer.from_json_str(backend.to_str())
        fast.no_truncation()
        fast.no_padding()
        fast.enable_segment_cache(CACHE_BYTES)

        def encode_fast(text: str, special: bool) -> list[int]:
            try:
                return list(fast.encode(text, special).ids)
            except Exception:  # of a byte without a token, which `tokenizers` leaves out
                return self.reserve(text, special)
            except BaseException as error:
                _check_is_fault(error)
                self._retire_fastokens()
                return self.reserve(text, special)

        return encode_fast

    def _retire_fastokens(self) -> None:
        self.encode, self.library = self.reserve, "tokenizers"
        log.warning("tokenizer_library_unused", library="fastokens", reason="it has panicked")


def _read_tokenized(
    ids: Sequence[int], types: Sequence[int], places: Sequence[int | None]
) -> TokenizedText:
    return TokenizedText(list(ids), list(types), [0 if at is None else at + 1 for at in places])


def _check_is_fault(error: BaseException) -> None:
    """Raise an error again that is neither an exception of a library nor a panic in Rust."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
