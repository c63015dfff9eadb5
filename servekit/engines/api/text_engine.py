"""What an engine is that speaks text: it gets requests as they came, and brings text.

For what tokenises and renders by itself, such as a remote endpoint. It has no codec; the worker
looks into a request only to refuse what `ModelInfo.serves` does not name. It keeps to `stop`,
limits and grammars itself, counts tokens as well as it can, and says what it thinks and calls in
the frames of `wire.dialects.FRAMED`. Its `ModelInfo.resumes` is False: text has no token ids to go
on from.

    info = engine.load(report)           # returns once a real answer has come: there is no other
    engine.ask(job)                      # instead of `submit` and `embed`
    engine.trouble                       # probe than its own, for each may cost money
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from servekit.engines.api.base import Engine, Job, StepOutput
from servekit.errors import RequestError, Unsupported
from servekit.protocol.messages import Generate


@dataclass(slots=True)
class TextJob:
    """One request as it came. Its task is "generate" or "embed"; it holds no token ids."""

    id: int
    request: Generate


class TextOutput(StepOutput, gc=True):  # its error may lead back to it
    """As StepOutput, of text. The counts are known with `finish` at the latest, 0 before.

    A failed job has `failure` set, and gets no further output.
    """

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stop: str = ""  # the stop string that ended it, where that is known
    failure: RequestError | None = None


class TextEngine(Engine):
    """One model that speaks text."""

    @property
    def trouble(self) -> str:
        """A sentence while it cannot serve, and its process is not to blame; "" while it can."""
        return ""

    @abstractmethod
    def ask(self, job: TextJob) -> None:
        """Queue a job; as `submit`."""

    def submit(self, job: Job) -> None:
        raise Unsupported("this engine takes text, not token ids", param="prompt")
