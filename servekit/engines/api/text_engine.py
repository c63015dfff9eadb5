"""The interface of engines that take and return text.

For backends that tokenise and render chats themselves, such as a remote endpoint. Such an engine
has no codec; the worker inspects a request only to refuse what `ModelInfo.serves` does not cover.
The engine applies `stop`, limits and grammars itself, counts tokens as well as it can, and marks
thoughts and tool calls with the frames of `protocol.tool_formats.FRAMED`. Its `ModelInfo.resumes`
is False, because it has no token ids; it may be able to go on after the text of another worker
(`continues`).

    info = engine.load(report)           # returns after a first real answer
    engine.ask(job)                      # replaces `submit` and `embed`
    engine.trouble
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from servekit.engines.api.base import Engine, Job, StepOutput
from servekit.errors import RequestError, Unsupported
from servekit.protocol.messages import Generate, HttpPart


@dataclass(slots=True)
class TextJob:
    """A request as received: "generate", "embed" or "forward". It has no token ids."""

    id: int
    request: Generate


class TextOutput(StepOutput, gc=True):  # its error may refer back to it
    """A StepOutput with text.

    Its token ids are unknown (UNKNOWN_TOKEN). The token counts are 0 until they are known, at the
    latest with `finish`. A failed job has `failure` set and gets no further output.
    """

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stop: str = ""  # the stop string that ended it, if known
    failure: RequestError | None = None
    http: HttpPart | None = None  # of a forwarded request


class TextEngine(Engine):
    """The base class of engines with text as input and output."""

    #: The worker sends probes when it is idle. Not to a remote endpoint: they may cost money.
    probed = False

    @property
    def trouble(self) -> str:
        """Reason why the model cannot serve through no fault of this process; "" while it can."""
        return ""

    def continues(self, request: Generate) -> bool:
        """Return whether a worker could go on after the text of another one's answer."""
        return False

    def extend_window(self, job_id: int, size_bytes: int) -> None:
        """Allow a forwarded request to emit so many more bytes of its response.

        At first it may emit WINDOW_BYTES.
        """

    @abstractmethod
    def ask(self, job: TextJob) -> None:
        """Queue a job; raises as `submit` does."""

    def submit(self, job: Job) -> None:
        raise Unsupported("this engine takes text, not token ids", param="prompt")
