"""A simulated prefix cache for the echo engine.

It stores hashes of whole token blocks, each over the block and everything before it, as in vLLM and
the paged cache of transformers; each adapter and each salt has separate blocks. The least recently
used blocks are evicted first.
"""

from __future__ import annotations

from collections import OrderedDict

from servekit.engines.api.base import Job

BLOCK = 32


class EchoCache:
    """A prefix cache for `tokens` tokens; reading a token that is not cached takes `token_s`."""

    def __init__(self, tokens: int, token_s: float) -> None:
        self.tokens = tokens
        self._token_s = token_s
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def read(self, job: Job) -> tuple[int, float]:
        """Return the number of cached prompt tokens and the time to read the others, in seconds.

        The last token is never cached, because the first token of the answer is computed from it.
        """
        ids, last, found, known = job.prompt_ids, hash((job.adapter, job.cache_salt)), 0, True
        chain = []
        for at in range(0, len(ids) - BLOCK + 1, BLOCK):
            last = hash((last, tuple(ids[at : at + BLOCK])))
            chain.append(last)
            known = known and last in self._blocks
            found += BLOCK * known
        self._keep(chain)
        cached = min(found, (len(ids) - 1) // BLOCK * BLOCK)
        return cached, (len(ids) - cached) * self._token_s

    def _keep(self, chain: list[int]) -> None:
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) * BLOCK > self.tokens:
            self._blocks.popitem(last=False)
