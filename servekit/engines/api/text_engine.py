"""The interface of engines that take and return text.

For backends that tokenise and render chats themselves, such as a remote endpoint. Such an engine
has no codec; the worker inspects a request only to refuse what `ModelInfo.serves` does not cover.
The engine applies `stop`, limits and grammars itself, counts tokens as well as it can, and marks
thoughts and tool calls with the frames of `protocol.tool_formats.FRAMED`. Its `ModelInfo.resumes`
is False, because without token ids no other worker can continue its streams.

    info = engine.load(report)           # returns after a first real answer: the worker sends no
    engine.ask(job)                      # probe of its own, because each one may cost money;
    engine.trouble                       # `ask` replaces `submit` and `embed`
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from servekit.engines.api.base import Engine, Job, StepOutput
from servekit.errors import RequestError, Unsupported
from servekit.protocol.messages import Generate


@dataclass(slots=True)
class TextJob:
    """A request as received. Its task is "generate" or "embed"; it has no token ids."""

    id: int
    request: Generate


class TextOutput(StepOutput, gc=True):  # its error may refer back to it
    """A StepOutput with text.

    The token counts are 0 until they are known, at the latest with `finish`. A failed job has
    `failure` set and gets no further output.
    """

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stop: str = ""  # the stop string that ended it, if known
    failure: RequestError | None = None


class TextEngine(Engine):
    """The base class of engines with text as input and output."""

    @property
    def trouble(self) -> str:
        """Reason why the model cannot serve through no fault of this process; "" while it can."""
        return ""

    @abstractmethod
    def ask(self, job: TextJob) -> None:
        """Queue a job; raises as `submit` does."""

    def submit(self, job: Job) -> None:
        raise Unsupported("this engine takes text, not token ids", param="prompt")
