"""The thread that makes the embeddings of images and recordings, beside the engine's passes.

An encoding takes from milliseconds to seconds. The passes of other requests go on meanwhile, as a
projector has buffers and a schedule of its own in llama.cpp.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from servekit.engines.llamacpp.media.mtmd import ChunkedPrompt, MediaChunk, Projector
from servekit.errors import describe_error

#: Chunks of a request that are encoded ahead of the one that is read next.
AHEAD = 2
#: An encoding that takes longer hangs. A large image takes minutes on a CPU.
HANGS_S = 600.0


class ChunkEncoder:
    """The thread of one projector. Its methods are called by the engine's thread."""

    def __init__(self, projector: Projector) -> None:
        self._projector = projector
        self._changed = threading.Condition()
        self._queue: deque[tuple[ChunkedPrompt, MediaChunk]] = deque()
        self._closing = False
        self._began_at = 0.0  # the encoding that runs; 0: none does
        self._thread = threading.Thread(target=self._encode_chunks, name="images", daemon=True)
        self._thread.start()

    def request(self, prompt: ChunkedPrompt, start: int) -> None:
        """Have the next chunks of a prompt encoded, from token `start` on."""
        ahead = [one for one in prompt.chunks if one.end > start][: AHEAD + 1]
        with self._changed:
            for chunk in ahead:
                if not chunk.requested:
                    chunk.requested = True
                    self._queue.append((prompt, chunk))
                    self._changed.notify_all()

    def drop(self, prompt: ChunkedPrompt) -> None:
        """Forget the embeddings of a prompt, and encode no more of it."""
        with self._changed:
            self._queue = deque(one for one in self._queue if one[0] is not prompt)
            for chunk in prompt.chunks:
                self.drop_embeddings(chunk)

    @staticmethod
    def drop_embeddings(chunk: MediaChunk) -> None:
        """Forget the embeddings of a chunk that has been read."""
        chunk.requested, chunk.embeddings = False, None

    def wait(self, chunks: list[MediaChunk], timeout_s: float) -> None:
        """Wait until one of the chunks is encoded, or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: any(map(_is_done, chunks)), timeout_s)

    @property
    def hangs(self) -> bool:
        """True if the encoding that runs is no progress any more."""
        began_at = self._began_at
        return began_at > 0 and time.monotonic() - began_at > HANGS_S

    def close(self) -> None:
        """Stop the thread after its current chunk, and wait for that."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()

    def _encode_chunks(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                prompt, chunk = self._queue.popleft()
                self._began_at = time.monotonic()
            try:
                made, failure = self._projector.encode(chunk), ""
            except Exception as error:  # of the library: the request fails, and no other
                made, failure = None, describe_error(error)
            with self._changed:
                self._began_at = 0.0
                if chunk.requested:  # otherwise it was dropped meanwhile
                    chunk.embeddings, chunk.failure = made, failure
                self._changed.notify_all()
            del prompt, chunk  # their memory may be freed


def _is_done(chunk: MediaChunk) -> bool:
    return chunk.embeddings is not None or bool(chunk.failure)
