"""libmtmd, llama.cpp's library for images and recordings: the used part of its C interface.

xllamacpp has it inside; elsewhere it is a file beside llama.cpp's library. A projector (`mmproj`)
makes embeddings of images and recordings, which the model reads in place of tokens. Source:
llama.cpp, tools/mtmd/mtmd.h and mtmd-helper.cpp, releases from b10771 on.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servekit.engines.llamacpp.library.capi import Functions, Library, LogCallback, LogListener
from servekit.engines.llamacpp.library.struct_layouts import Layout, fill_copy, recognise_default
from servekit.errors import LoadError, RequestError
from servekit.protocol.types import Modality

Array = NDArray[np.float32]
_P = c_void_p
_TEXT, _IMAGE = 0, 1  # mtmd_input_chunk_type; others are recordings
#: Bits of a mark that tell the pieces of one image apart.
_MARK_BITS = 32
#: Silence follows a shorter recording: libmtmd ends the process for a single sample, and mirrors
#: the first 200 whether or not they are there. Source: `log_mel_spectrogram` of mtmd-audio.cpp.
_LEAST_SAMPLES = 400


class _Text(ctypes.Structure):
    """`mtmd_input_text`."""

    _fields_ = (
        ("text", c_char_p),
        ("text_len", c_size_t),
        ("add_special", c_bool),
        ("parse_special", c_bool),
    )


class _Part(ctypes.Structure):
    """`mtmd_input_part`: a text or a bitmap."""

    _fields_ = (("text", POINTER(_Text)), ("bitmap", c_void_p))


#: Result and argument types by function name, as in `capi`.
_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mtmd_default_marker": (_P, ()),
    "mtmd_log_set": (None, (LogCallback, _P)),
    "mtmd_free": (None, (_P,)),
    "mtmd_decode_use_non_causal": (c_bool, (_P, _P)),
    "mtmd_decode_use_mrope": (c_bool, (_P,)),
    "mtmd_support_vision": (c_bool, (_P,)),
    "mtmd_support_audio": (c_bool, (_P,)),
    "mtmd_get_audio_sample_rate": (c_int32, (_P,)),
    "mtmd_bitmap_init": (_P, (c_uint32, c_uint32, c_char_p)),
    "mtmd_bitmap_init_from_audio": (_P, (c_size_t, _P)),
    "mtmd_bitmap_set_id": (None, (_P, c_char_p)),
    "mtmd_bitmap_free": (None, (_P,)),
    "mtmd_input_chunks_init": (_P, ()),
    "mtmd_input_chunks_free": (None, (_P,)),
    "mtmd_input_chunks_size": (c_size_t, (_P,)),
    "mtmd_input_chunks_get": (_P, (_P, c_size_t)),
    "mtmd_input_chunk_get_type": (c_int32, (_P,)),
    "mtmd_input_chunk_get_tokens_text": (POINTER(c_int32), (_P, POINTER(c_size_t))),
    "mtmd_input_chunk_get_tokens_image": (_P, (_P,)),
    "mtmd_input_chunk_get_n_tokens": (c_size_t, (_P,)),
    "mtmd_input_chunk_get_n_pos": (c_int32, (_P,)),
    "mtmd_input_chunk_get_id": (c_char_p, (_P,)),
    "mtmd_tokenize_from_parts": (c_int32, (_P, _P, POINTER(POINTER(_Part)), c_size_t, c_bool)),
    "mtmd_encode_chunk": (c_int32, (_P, _P)),
    "mtmd_get_output_embd": (POINTER(c_float), (_P,)),
    "mtmd_helper_image_get_decoder_pos": (None, (_P, c_int32, _P)),
}


def _params_layout(marker: int) -> Layout:
    """Return the layout of `mtmd_context_params`; see `struct_layouts`."""
    return (
        ("use_gpu", c_bool, True),
        ("device", c_void_p, None),
        ("print_timings", c_bool, True),
        ("n_threads", c_int32, 4),
        ("image_marker", c_void_p, None),
        ("media_marker", c_void_p, marker),
        ("flash_attn_type", c_int32, -1),
        ("warmup", c_bool, True),
        ("image_min_tokens", c_int32, -1),
        ("image_max_tokens", c_int32, -1),
    )


class Mtmd(Functions):
    """The library: the functions above, and its log."""

    def __init__(self, library: Library) -> None:
        """Find it in llama.cpp's library, or beside it. Raises LoadError if it is not there."""
        super().__init__(_open_library(library), library.binding)
        for name, (result, arguments) in _PROTOTYPES.items():
            self.declare(name, result, arguments)
        layout = _params_layout(self.call("mtmd_default_marker"))
        self._params = recognise_default(self, "mtmd_context_params_default", (layout,))
        self.declare("mtmd_init_from_file", _P, (c_char_p, _P, type(self._params)))
        self.log = LogListener()
        self.call("mtmd_log_set", self.log.callback, None)

    def load_projector(self, path: str, model: int, fields: dict[str, Any]) -> int | None:
        """Load a projector for a model and return its address; None if it fails (see `log`)."""
        self.log.listen()
        params = fill_copy(self._params, fields)
        made: int | None = self.call("mtmd_init_from_file", path.encode(), model, params)
        return made


def _open_library(library: Library) -> ctypes.CDLL:
    """Return llama.cpp's library, if libmtmd is in it, or that beside it. Raises LoadError."""
    opened = ctypes.CDLL(library.path)
    if hasattr(opened, "mtmd_init_from_file"):
        return opened
    found = sorted(Path(library.path).parent.glob("libmtmd*.so*"))
    if not found:
        raise LoadError(
            f"{library.binding} comes without libmtmd, llama.cpp's library for images and"
            " recordings. The package of pip install 'servekit[llamacpp]' has it."
        )
    try:
        return ctypes.CDLL(str(found[0]))
    except OSError as error:
        raise LoadError(f"{found[0]} cannot be loaded: {error}.") from error


# ---------------------------------------------------------------- chunks of a prompt


#: No token has an id that is as large.
NO_TOKEN = 2**31
#: Stands in a prompt's ids for each token of an image or a recording.
FILLER = 0


@dataclass(slots=True, eq=False)
class MediaChunk:
    """An image or a recording in a prompt, or a part of one: a projector makes it in one go.

    `start` and `count` are tokens of the prompt, `positions` what the model's positions advance by:
    with M-RoPE fewer than the tokens. A `whole` chunk is attended to in both directions, and so has
    to be read in one pass. `mark` stands for its content where prompts are compared; it is larger
    than any token id.
    """

    address: int
    start: int
    count: int
    positions: int
    whole: bool
    is_image: bool
    mark: int
    requested: bool = False  # of `ChunkEncoder`
    embeddings: Array | None = None  # [count, width]
    failure: str = ""

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def marks(self) -> list[int]:
        """What stands for its tokens where prompts are compared."""
        return [self.mark, *range(-1, -self.count, -1)]


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of a prompt's tokens.

    `saved` has where each chunk ends, and how many fewer positions than tokens there are by then.
    """

    saved: tuple[tuple[int, int], ...] = ()

    def find(self, index: int) -> int:
        """Return the position of a token that is a text's, or the first of a chunk."""
        before = bisect_right(self.saved, index, key=lambda one: one[0])
        return index - self.saved[before - 1][1] if before else index


#: Those of a prompt without images.
PLAIN = Positions()


@dataclass(slots=True, eq=False)
class ChunkedPrompt:
    """The chunks of a prompt, in llama.cpp's memory, and its token ids."""

    ids: list[int]
    chunks: list[MediaChunk]
    memory: object = field(repr=False)  # frees the chunks with this object

    def find_chunk(self, index: int) -> MediaChunk | None:
        """Return the chunk that token `index` belongs to; None: a text."""
        before = bisect_right(self.chunks, index, key=lambda one: one.start)
        chunk = self.chunks[before - 1] if before else None
        return chunk if chunk is not None and index < chunk.end else None

    def next_start(self, index: int, end: int) -> int:
        """Return where the first chunk from token `index` on begins, or `end`."""
        at = bisect_left(self.chunks, index, key=lambda one: one.start)
        return self.chunks[at].start if at < len(self.chunks) else end

    @property
    def positions(self) -> Positions:
        saved = accumulate(one.count - one.positions for one in self.chunks)
        return Positions(tuple(zip((one.end for one in self.chunks), saved, strict=True)))

    def mark_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return a prompt's tokens, and what follows it, with the marks of its chunks."""
        marked = list(tokens)
        for one in self.chunks:
            marked[one.start : one.end] = one.marks
        return marked


class Bitmap:
    """An image in RGB, or samples of a recording, for `Projector.tokenize`."""

    def __init__(self, mtmd: Mtmd, address: int, key: bytes) -> None:
        """`key` is a digest of its content, in hexadecimal digits."""
        self.address = address
        self._freed = weakref.finalize(self, mtmd.call, "mtmd_bitmap_free", address)
        mtmd.call("mtmd_bitmap_set_id", address, key)

    def free(self) -> None:
        self._freed()


class Projector:
    """A loaded projector. One thread at a time encodes, and one tokenises."""

    def __init__(self, mtmd: Mtmd, address: int, width: int, path: Path) -> None:
        """`width` is the number of an embedding's numbers, as the model takes it."""
        self._mtmd, self._address, self._width = mtmd, address, width
        self.path = path
        of = mtmd.call
        found: dict[Modality, bool] = {
            "images": of("mtmd_support_vision", address),
            "audio": of("mtmd_support_audio", address),
        }
        self.modalities = tuple(modality for modality, has in found.items() if has)
        self.sample_rate: int = of("mtmd_get_audio_sample_rate", address)
        self.multiplies_positions: bool = of("mtmd_decode_use_mrope", address)

    def take_image(self, size: tuple[int, int], rgb: bytes, key: bytes) -> Bitmap:
        """Copy an image of `size` (width, height)."""
        return Bitmap(self._mtmd, self._mtmd.call("mtmd_bitmap_init", *size, rgb), key)

    def take_recording(self, samples: Array, key: bytes) -> Bitmap:
        """Copy the samples of a recording at `sample_rate`, from -1 to 1."""
        plain = np.ascontiguousarray(samples, np.float32)
        if len(plain) < _LEAST_SAMPLES:
            plain = np.pad(plain, (0, _LEAST_SAMPLES - len(plain)))
        made = self._mtmd.call("mtmd_bitmap_init_from_audio", len(plain), plain.ctypes.data)
        return Bitmap(self._mtmd, made, key)

    def tokenize(self, parts: Sequence[str | Bitmap], *, special: bool) -> ChunkedPrompt:
        """Return the chunks of a prompt. One thread at a time calls it.

        `special`: the tokens of a text's beginning and end are added. Raises RequestError if a
        picture cannot be prepared.
        """
        self._mtmd.log.listen()
        kept, pointers = [], (POINTER(_Part) * len(parts))()
        for at, part in enumerate(parts):
            if isinstance(part, str):
                data = part.encode(errors="replace")
                text = _Text(data, len(data), False, True)
                kept.append(_Part(ctypes.pointer(text), None))
            else:
                kept.append(_Part(None, part.address))
            pointers[at] = ctypes.pointer(kept[-1])
        made: int = self._mtmd.call("mtmd_input_chunks_init")
        memory = _ChunkMemory(self._mtmd, made)
        arguments = (self._address, made, pointers, len(parts), special)
        if self._mtmd.call("mtmd_tokenize_from_parts", *arguments):
            raise RequestError(
                "messages: llama.cpp cannot prepare these images or recordings: "
                f"{self._mtmd.log.complaints}",
                param="messages",
            )
        return self._read_chunks(made, memory)

    def _read_chunks(self, chunks: int, memory: _ChunkMemory) -> ChunkedPrompt:
        of = self._mtmd.call
        prompt = ChunkedPrompt([], [], memory)
        pieces: Counter[bytes] = Counter()  # an image may have several chunks
        for at in range(of("mtmd_input_chunks_size", chunks)):
            chunk = of("mtmd_input_chunks_get", chunks, at)
            kind = of("mtmd_input_chunk_get_type", chunk)
            if kind == _TEXT:
                count = c_size_t()
                tokens = of("mtmd_input_chunk_get_tokens_text", chunk, ctypes.byref(count))
                prompt.ids += tokens[: count.value]
                continue
            key: bytes = of("mtmd_input_chunk_get_id", chunk)
            made = MediaChunk(
                address=chunk,
                start=len(prompt.ids),
                count=of("mtmd_input_chunk_get_n_tokens", chunk),
                positions=of("mtmd_input_chunk_get_n_pos", chunk),
                whole=of("mtmd_decode_use_non_causal", self._address, chunk),
                is_image=kind == _IMAGE,
                mark=(int(key, 16) + 1) << _MARK_BITS | pieces[key],
            )
            pieces[key] += 1
            prompt.chunks.append(made)
            prompt.ids += [FILLER] * made.count
        return prompt

    def encode(self, chunk: MediaChunk) -> Array:
        """Return the embeddings of a chunk [count, width]. Raises RuntimeError if it fails."""
        self._mtmd.log.listen()
        if self._mtmd.call("mtmd_encode_chunk", self._address, chunk.address):
            raise RuntimeError(f"llama.cpp cannot encode it: {self._mtmd.log.complaints}")
        found = self._mtmd.call("mtmd_get_output_embd", self._address)
        return np.ctypeslib.as_array(found, (chunk.count, self._width)).copy()

    def locate(self, chunk: MediaChunk, first: int) -> NDArray[np.int32]:
        """Return the positions of a chunk's tokens, [parts, count], from position `first` on.

        With M-RoPE they have four parts: of time, height and width, and one that is not used.
        """
        plain = np.arange(first, first + chunk.count, dtype=np.int32)
        if not self.multiplies_positions:
            return plain[None]
        if not chunk.is_image:
            return np.stack([plain, plain, plain, np.zeros_like(plain)])
        found = np.zeros((chunk.count, 4), np.int32)  # t, x, y, z
        image = self._mtmd.call("mtmd_input_chunk_get_tokens_image", chunk.address)
        self._mtmd.call("mtmd_helper_image_get_decoder_pos", image, first, found.ctypes.data)
        return np.ascontiguousarray(found.T[[0, 2, 1, 3]])

    def close(self) -> None:
        if self._address:
            self._mtmd.call("mtmd_free", self._address)
            self._address = 0


class _ChunkMemory:
    """The memory of a prompt's chunks, freed with this object."""

    def __init__(self, mtmd: Mtmd, chunks: int) -> None:
        weakref.finalize(self, mtmd.call, "mtmd_input_chunks_free", chunks)


def open_mtmd(library: Library) -> Mtmd:
    """Return the library; opened once for each library of llama.cpp. Raises LoadError."""
    if library.path not in _opened:
        _opened[library.path] = Mtmd(library)
    return _opened[library.path]


_opened: dict[str, Mtmd] = {}
