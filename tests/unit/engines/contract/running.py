"""An engine that runs, driven as a worker drives it, and all that it has emitted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from servekit.engines import create_engine
from servekit.engines.api.base import EmbedJob, Job, StepOutput
from servekit.errors import RequestError
from servekit.protocol.messages import (
    ModelInfo,
    Progress,
    SamplingParams,
    TokenLogprob,
    WorkerSpec,
)
from servekit.worker.engine_threads import start_engine

DEADLINE_S = 60.0


class Running:
    """Made by `create`, loaded and started; close it."""

    def __init__(self, spec: WorkerSpec, *, exact: bool = True) -> None:
        self.spec = spec
        self.exact = exact
        self.engine = create_engine(spec)
        self.progress: list[Progress] = []
        self.info: ModelInfo = self.engine.load(self.progress.append)
        self.outputs: dict[int, list[StepOutput]] = {}
        self.late: list[StepOutput] = []  # of jobs that had ended
        self.breaks: Exception | None = None  # raised where the engine tells what it made
        self._changed = threading.Condition()
        self._last = 0
        start_engine(self.engine, self._emit)

    def _emit(self, outputs: Sequence[StepOutput]) -> None:
        with self._changed:
            if self.breaks is not None:
                raise self.breaks
            for output in outputs:
                if self.ended(output.id):
                    self.late.append(output)
                self.outputs.setdefault(output.id, []).append(output)
            self._changed.notify_all()

    def close(self) -> None:
        self.engine.close()

    @property
    def endless(self) -> dict[str, Any]:
        """Parameters of a job that is cancelled before its end."""
        return {"max_tokens": self.info.max_context - 64, "ignore_eos": True}

    # ---- asking

    def job(
        self,
        prompt: str | list[int],
        emitted: Sequence[int] = (),
        adapter: str = "",
        banned: Sequence[tuple[int, ...]] = (),
        **params: Any,
    ) -> Job:
        self._last += 1
        ids = self.engine.codec.encode(prompt) if isinstance(prompt, str) else prompt
        sampling = SamplingParams(**{"max_tokens": 16, "temperature": 0.0} | params)
        job = Job(self._last, ids, sampling, list(emitted), adapter=adapter, banned=tuple(banned))
        if sampling.grammar is not None:
            job.constraint = self.engine.constrain(sampling.grammar, emitted)
        return job

    def submit(self, prompt: str | list[int], emitted: Sequence[int] = (), **more: Any) -> int:
        """Queue a job, greedy and of 16 tokens unless told otherwise; its id."""
        job = self.job(prompt, emitted, **more)
        self.engine.submit(job)
        return job.id

    def submit_late(self, prompt: str) -> None:
        """Ask an engine that is dead: it refuses, or says nothing."""
        with contextlib.suppress(RequestError):
            self.submit(prompt)

    def generate(self, prompt: str | list[int], **more: Any) -> list[int]:
        return self.tokens(self.submit(prompt, **more))

    def embed(self, *texts: str) -> list[bytes]:
        self._last += 1
        self.engine.embed(EmbedJob(self._last, [self.engine.codec.encode(t) for t in texts]))
        [output] = self.finished(self._last)
        assert output.finish == "stop" and output.vectors is not None
        return output.vectors

    # ---- what came

    def ended(self, job_id: int) -> bool:
        last = self.outputs.get(job_id, [])[-1:]
        return bool(last) and (last[0].finish is not None or last[0].error is not None)

    def finished(self, job_id: int) -> list[StepOutput]:
        """Wait for the end; all its outputs. Fails on an error."""
        self.until(lambda: self.ended(job_id), f"job {job_id} ends")
        errors = [output.error for output in self.outputs[job_id] if output.error]
        assert not errors, errors
        return self.outputs[job_id]

    def tokens(self, job_id: int) -> list[int]:
        return [token for output in self.finished(job_id) for token in output.token_ids]

    def finish(self, job_id: int) -> str | None:
        return self.finished(job_id)[-1].finish

    def logprobs(self, job_id: int) -> list[TokenLogprob]:
        return [one for output in self.finished(job_id) for one in output.logprobs or ()]

    def alike(self, said: Sequence[int], expected: Sequence[int]) -> bool:
        """The same tokens; in low precision as many that begin alike: a near-tie may part them."""
        begin = None if self.exact else 2
        return len(said) == len(expected) and said[:begin] == expected[:begin]

    def text(self, tokens: Sequence[int]) -> str:
        decoder = self.engine.codec.decoder()
        return decoder.push(tokens) + decoder.flush()

    # ---- waiting

    def until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait for what an emission brings about."""
        with self._changed:
            if not self._changed.wait_for(happened, DEADLINE_S):
                raise AssertionError(f"waited {DEADLINE_S} s in vain until {what}")

    def has_begun(self, job_id: int) -> None:
        self.until(lambda: job_id in self.outputs, f"job {job_id} has a token")

    def is_idle(self) -> bool:
        now = self.engine.load_now()
        return (now.running, now.waiting, now.progress_age_s) == (0, 0, 0.0)
