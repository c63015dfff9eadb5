"""A model and a context of llama.cpp, and passes over batches of tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p

import numpy as np
from numpy.typing import NDArray

from servekit.engines.llamacpp.library.bindings import Binding, Settings
from servekit.engines.llamacpp.library.capi import Batch, Library
from servekit.engines.llamacpp.vocabulary import Vocabulary


class InsufficientMemory(Exception):
    """llama.cpp found no place for a batch in its KV cache, which is unchanged."""


class Model:
    """A loaded model."""

    def __init__(self, library: Library, address: int) -> None:
        self.address = address
        self._library = library
        self.vocabulary = Vocabulary(library, address)
        of = library.call
        self.parameters: int = of("llama_model_n_params", address)
        self.size_bytes: int = of("llama_model_size", address)
        self.embedding_size: int = of("llama_model_n_embd", address)
        #: Numbers of an embedding in place of a token: some models have more for images.
        self.input_size: int = of("llama_model_n_embd_inp", address)
        self.description = library.call_for_text("llama_model_desc", address)
        self.encodes: bool = of("llama_model_has_encoder", address)
        #: A sequence can be cut anywhere and continued from there.
        self.rewinds = not (
            of("llama_model_is_recurrent", address) or of("llama_model_is_hybrid", address)
        )
        #: Tokens that layers with a sliding window attend to; 0 if no layer has a window.
        self.window: int = of("llama_model_n_swa", address)

    @property
    def chat_template(self) -> str:
        return self._find_template(None)

    @property
    def pair_template(self) -> str:
        """The text of a query and a document, with {query} and {document}; "" if there is none."""
        return self._find_template(b"rerank")

    def _find_template(self, name: bytes | None) -> str:
        template: bytes | None = self._library.call("llama_model_chat_template", self.address, name)
        return (template or b"").decode(errors="replace")

    def labels(self) -> tuple[str, ...]:
        """Return the labels of a classifier; those without a name are numbers.

        Raises LoadError if the library knows none.
        """
        self._library.declare("llama_model_n_cls_out", c_uint32, (c_void_p,))
        self._library.declare("llama_model_cls_label", c_char_p, (c_void_p, c_uint32))
        of = self._library.call
        count: int = of("llama_model_n_cls_out", self.address)
        names = [of("llama_model_cls_label", self.address, at) for at in range(count)]
        return tuple(
            f"LABEL_{at}" if name is None else name.decode(errors="replace")
            for at, name in enumerate(names)
        )

    def close(self) -> None:
        if self.address:
            self._library.call("llama_model_free", self.address)
            self.address = 0


class Context:
    """A context of a model: its sequences of tokens, and the KV cache that they share.

    For one thread at a time.
    """

    def __init__(self, binding: Binding, model: Model, address: int, settings: Settings) -> None:
        self._library = library = binding.library
        self._address = address
        self._vocab_size = model.vocabulary.size
        self._embedding_size = model.embedding_size
        self.capacity: int = library.call("llama_n_ctx", address)
        self.batch_tokens = settings.batch
        self.sequences = settings.sequences
        self._memory = library.call("llama_get_memory", address)  # None: there is no cache
        self._batch = library.call("llama_batch_init", settings.batch, 0, 1)
        self._window = model.window
        self._outputs = settings.pooling is not None
        self._run = "llama_decode" if self._memory or not model.encodes else "llama_encode"

    # ---------------------------------------------------------------- a pass

    def clear_batch(self) -> None:
        """Clear the batch."""
        self._batch.n_tokens = 0

    def put(
        self, sequence: int, start: int, tokens: Sequence[int], *, output: bool, every: bool = False
    ) -> int:
        """Add a sequence's tokens from position `start`; return the last one's place in the batch.

        With `output` the logits of the last token are computed, with `every` those of all tokens.
        """
        batch, at = self._batch, self._batch.n_tokens
        for offset, token in enumerate(tokens):
            place = at + offset
            batch.token[place] = token
            batch.pos[place] = start + offset
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence
            batch.logits[place] = self._outputs or every
        batch.n_tokens = at + len(tokens)
        batch.logits[batch.n_tokens - 1] = output or every
        return int(batch.n_tokens) - 1

    def decode_batch(self) -> None:
        """Run one pass over the batch.

        Raises InsufficientMemory, or RuntimeError if llama.cpp fails.
        """
        self._run_pass(self._batch)

    def decode_embeddings(
        self,
        sequence: int,
        positions: NDArray[np.int32],
        embeddings: NDArray[np.float32],
        *,
        output: bool,
        causal: bool,
    ) -> None:
        """Run one pass over `embeddings` [count, width] in place of tokens; raises as the above.

        `positions` [parts, count] have several parts with M-RoPE. With `output` the logits of the
        last one are computed. Without `causal` each is attended to by all others.
        """
        count = len(embeddings)
        places, rows = np.ascontiguousarray(positions), np.ascontiguousarray(embeddings)
        one = (c_int32 * 1)(sequence)
        batch = Batch(
            count,
            None,
            rows.ctypes.data_as(POINTER(c_float)),
            places.ctypes.data_as(POINTER(c_int32)),
            (c_int32 * count)(*[1] * count),
            (POINTER(c_int32) * count)(*[ctypes.cast(one, POINTER(c_int32))] * count),
            (c_int8 * count)(*[0] * (count - 1), output),
        )
        self._library.call("llama_set_causal_attn", self._address, causal)
        try:
            self._run_pass(batch)
        finally:
            self._library.call("llama_set_causal_attn", self._address, True)

    def _run_pass(self, batch: Batch) -> None:
        self._library.log.listen()
        code = self._library.call(self._run, self._address, batch)
        if code == 1:
            raise InsufficientMemory
        if code:
            raise RuntimeError(f"llama.cpp failed with code {code}: {self._library.log.complaints}")

    def logits(self, place: int) -> NDArray[np.float32]:
        """Return a place's logits [vocabulary], in llama.cpp's memory until the next pass."""
        found = self._library.call("llama_get_logits_ith", self._address, place)
        if not found:
            raise RuntimeError(f"llama.cpp has no logits for place {place} of its batch")
        return np.ctypeslib.as_array(found, (self._vocab_size,))

    def embedding(self, sequence: int, size: int = 0) -> NDArray[np.float32]:
        """Return a copy of a sequence's pooled vector, [size], by default the embedding's."""
        found = self._library.call("llama_get_embeddings_seq", self._address, sequence)
        if not found:
            raise RuntimeError(f"llama.cpp has no embedding of sequence {sequence}")
        return np.ctypeslib.as_array(found, (size or self._embedding_size,)).copy()

    # ---------------------------------------------------------------- the cache

    def cut_sequence(self, sequence: int, start: int) -> None:
        """Remove a sequence from position `start` on."""
        if self._memory:
            self._library.call("llama_memory_seq_rm", self._memory, sequence, start or -1, -1)

    def share_prefix(self, source: int, target: int, end: int) -> None:
        """Share the first `end` tokens of a sequence with an empty one, without a copy."""
        self._library.call("llama_memory_seq_cp", self._memory, source, target, 0, end)

    def can_continue(self, sequence: int, end: int) -> bool:
        """Return whether a sequence can continue from position `end`.

        Layers with a sliding window may have dropped tokens that are out of reach of the sequence's
        end.
        """
        if not self._window:
            return True
        first: int = self._library.call("llama_memory_seq_pos_min", self._memory, sequence)
        return 0 <= first <= max(0, end - self._window)

    def clear_cache(self) -> None:
        """Empty the cache."""
        if self._memory:
            self._library.call("llama_memory_clear", self._memory, True)

    def close(self) -> None:
        if self._address:
            self._library.call("llama_batch_free", self._batch)
            self._library.call("llama_free", self._address)
            self._address = 0
