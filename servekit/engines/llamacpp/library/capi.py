"""The used part of llama.cpp's C interface, called in the shared library of a Python binding.

Only stable parts are declared: opaque pointers, plain numbers, and `llama_batch`. The two structs
of parameters change often; a binding fills them (`bindings.py`) and they are passed on unread.
Source: llama.cpp, include/llama.h.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any

import structlog

from servekit.errors import LoadError

log: Any = structlog.get_logger(__name__)

#: ggml's log levels.
_WARN, _ERROR, _CONTINUED = 3, 4, 5
#: Number of error lines that are kept.
_KEPT_LINES = 20
_TEXT_BYTES = 4096
_GPU = 1  # ggml_backend_dev_type


class Batch(ctypes.Structure):
    """`llama_batch`: arrays of `n_tokens` elements; `logits` is nonzero for wanted outputs."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
#: llama.cpp keeps the address of a logger for good, even if the library is refused later.
_LOGGERS: list[Any] = []
_P = c_void_p
#: Result and argument types by function name. llama.cpp's own pointer types are plain addresses.
_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (LogCallback, _P)),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_model_free": (None, (_P,)),
    "llama_free": (None, (_P,)),
    "llama_model_get_vocab": (_P, (_P,)),
    "llama_model_n_embd": (c_int32, (_P,)),
    "llama_model_n_embd_inp": (c_int32, (_P,)),
    "llama_model_n_params": (ctypes.c_uint64, (_P,)),
    "llama_model_size": (ctypes.c_uint64, (_P,)),
    "llama_model_n_swa": (c_int32, (_P,)),
    "llama_model_has_encoder": (c_bool, (_P,)),
    "llama_model_is_recurrent": (c_bool, (_P,)),
    "llama_model_is_hybrid": (c_bool, (_P,)),
    "llama_model_desc": (c_int32, (_P, c_char_p, c_size_t)),
    "llama_model_meta_val_str": (c_int32, (_P, c_char_p, c_char_p, c_size_t)),
    "llama_model_chat_template": (c_char_p, (_P, c_char_p)),
    "llama_n_ctx": (c_uint32, (_P,)),
    "llama_n_ctx_seq": (c_uint32, (_P,)),
    "llama_n_batch": (c_uint32, (_P,)),
    "llama_n_ubatch": (c_uint32, (_P,)),
    "llama_n_seq_max": (c_uint32, (_P,)),
    "llama_n_threads": (c_int32, (_P,)),
    "llama_n_threads_batch": (c_int32, (_P,)),
    "llama_get_memory": (_P, (_P,)),
    "llama_memory_clear": (None, (_P, c_bool)),
    "llama_memory_seq_rm": (c_bool, (_P, c_int32, c_int32, c_int32)),
    "llama_memory_seq_pos_min": (c_int32, (_P, c_int32)),
    "llama_memory_seq_cp": (None, (_P, c_int32, c_int32, c_int32, c_int32)),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)),
    "llama_batch_free": (None, (Batch,)),
    "llama_decode": (c_int32, (_P, Batch)),
    "llama_set_causal_attn": (None, (_P, c_bool)),
    "llama_encode": (c_int32, (_P, Batch)),
    "llama_get_logits_ith": (POINTER(c_float), (_P, c_int32)),
    "llama_get_embeddings_seq": (POINTER(c_float), (_P, c_int32)),
    "llama_vocab_n_tokens": (c_int32, (_P,)),
    "llama_vocab_type": (c_int32, (_P,)),
    "llama_vocab_get_attr": (c_int32, (_P, c_int32)),
    "llama_vocab_is_eog": (c_bool, (_P, c_int32)),
    "llama_vocab_bos": (c_int32, (_P,)),
    "llama_vocab_eos": (c_int32, (_P,)),
    "llama_vocab_pad": (c_int32, (_P,)),
    "llama_tokenize": (c_int32, (_P, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "llama_token_to_piece": (c_int32, (_P, c_int32, c_char_p, c_int32, c_int32, c_bool)),
    "ggml_backend_cpu_buffer_type": (_P, ()),
    "ggml_backend_dev_count": (c_size_t, ()),
    "ggml_backend_dev_get": (_P, (c_size_t,)),
    "ggml_backend_dev_type": (c_int32, (_P,)),
    "ggml_backend_dev_memory": (None, (_P, POINTER(c_size_t), POINTER(c_size_t))),
}


class Functions:
    """Functions of a shared library by their C names. A call releases the GIL."""

    def __init__(self, opened: ctypes.CDLL, binding: str) -> None:
        self.binding = binding  # name and version, for messages
        self._library = opened

    def declare(self, name: str, result: Any, arguments: tuple[Any, ...]) -> None:
        """Make a function available to `call`. Raises LoadError if the library lacks it."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise LoadError(
                f"{self.binding} has no {name}; this version of it is not known to servekit. "
                "Install the one that servekit was tested with: pip install 'servekit[llamacpp]'."
            ) from None
        function.restype, function.argtypes = result, arguments
        setattr(self, name, function)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function by its C name."""
        return getattr(self, name)(*arguments)


class Library(Functions):
    """A llama.cpp library: the functions above, and its log.

    One per process, because llama.cpp's log is global.
    """

    def __init__(self, path: str, binding: str) -> None:
        """Open the library. Raises LoadError if it lacks a function."""
        super().__init__(ctypes.CDLL(path), binding)
        self.path = path
        for name, (result, arguments) in _PROTOTYPES.items():
            self.declare(name, result, arguments)
        self.log = LogListener()
        self.call("llama_log_set", self.log.callback, None)
        self.call("llama_backend_init")

    def creating(self, name: str, parameters: type[ctypes.Structure], first: Any) -> Any:
        """Return a function that creates an object from `first` and a struct of parameters."""
        function = getattr(self._library, name)
        function.restype, function.argtypes = c_void_p, (first, parameters)
        return function

    def address(self, name: str) -> int:
        """Return the address of a function, for callers without Python."""
        return ctypes.cast(getattr(self, name), c_void_p).value or 0

    def call_for_text(self, name: str, *arguments: Any) -> str:
        """Call a function that writes text into a buffer; return the text, "" if there is none."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        written = self.call(name, *arguments, buffer, _TEXT_BYTES)
        return buffer.value.decode(errors="replace") if written > 0 else ""

    # ---------------------------------------------------------------- GPUs

    def free_bytes(self) -> list[int]:
        """Return the free memory of each GPU that llama.cpp sees, in bytes."""
        free, total = c_size_t(), c_size_t()
        found = []
        for index in range(self.call("ggml_backend_dev_count")):
            device = self.call("ggml_backend_dev_get", index)
            if self.call("ggml_backend_dev_type", device) == _GPU:
                self.call("ggml_backend_dev_memory", device, free, total)
                found.append(free.value)
        return found


class LogListener:
    """The receiver of a library's log, which keeps its recent errors."""

    def __init__(self) -> None:
        self._complaints: list[str] = []
        self._dots: Callable[[], None] | None = None
        self.callback = LogCallback(self._on_log)
        _LOGGERS.append(self.callback)

    def listen(self, dots: Callable[[], None] | None = None) -> None:
        """Clear the kept errors; then call `dots` for each loaded percent of a model's tensors."""
        self._complaints.clear()
        self._dots = dots

    @property
    def complaints(self) -> str:
        """The recent errors, which say why a call failed."""
        return "; ".join(self._complaints) or "it does not say why"

    def _on_log(self, level: int, text: bytes | None, _: Any) -> None:
        if text == b"." and self._dots is not None:
            self._dots()
        if level not in (_WARN, _ERROR) or text is None:
            return
        line = " ".join(text.decode(errors="replace").split())
        severity = logging.ERROR if level == _ERROR else logging.INFO
        log.log(severity, "library_logged", library="llama.cpp", text=line)
        if level == _ERROR and line:
            self._complaints.append(line)
            del self._complaints[:-_KEPT_LINES]
