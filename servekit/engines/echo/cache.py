"""The echo engine's prefix cache: it keeps nothing but what a real one would have kept.

Whole blocks of tokens, known by the hash of all before them and their own, as in `vllm` and in
transformers' paged cache; those of each adapter and each salt apart. The least recently used are
forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict

from servekit.engines.api.base import Job

BLOCK = 32


class EchoCache:
    """A prefix cache of so many tokens; reading one that is not there takes `token_s`."""

    def __init__(self, tokens: int, token_s: float) -> None:
        self.tokens = tokens
        self._token_s = token_s
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def read(self, job: Job) -> tuple[int, float]:
        """How many of a prompt's tokens were there, and how long it takes to read the others.

        The last token is always read, since the first of the answer comes of it.
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
