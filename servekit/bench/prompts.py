"""The prompts: generated ones of given lengths, or those of a file; one turn or several."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from servekit.bench.client.client_protocol import Api, Asking
from servekit.errors import ConfigError

#: Common words of English, one token each in most vocabularies.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law "
    "car city community name president team minute idea body information back parent face others "
    "level office door health person art war history party result change morning reason research "
    "girl guy moment air teacher force education the and for with from about into over after under "
    "between out against during without before around among new old great high small large early "
    "young good other long little own important big public able last first next few bad same free "
    "say get make go know take see come think look want give use find tell ask seem feel try leave "
    "call keep let begin help talk turn start show hear play run move like live believe hold bring"
)
_WORDS = _TEXT.split()
_CORPUS_WORDS = 150_000


class DatasetLine(msgspec.Struct, frozen=True):
    """A line of a dataset: a prompt or the messages of a chat, and the maximum length of the
    answer.
    """

    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    max_tokens: int | None = None


def read_dataset(path: Path, api: Api) -> list[DatasetLine]:
    """Return the lines of a JSONL file; raises ConfigError with the line's number."""
    if path.exists() and not path.is_file():  # each client process reads it again
        raise ConfigError(f"--dataset {path} is not a regular file, which can be read twice")
    try:
        texts = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--dataset {path}: {error.strerror}") from None
    lines = [
        _parse_line(f"{path}:{n}", text, api) for n, text in enumerate(texts, 1) if text.strip()
    ]
    if not lines:
        raise ConfigError(f"--dataset {path} has no lines")
    return lines


def _parse_line(where: str, text: bytes, api: Api) -> DatasetLine:
    try:
        found = msgspec.json.decode(text, type=DatasetLine | str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    line = DatasetLine(prompt=found) if isinstance(found, str) else found
    if (line.prompt is None) == (line.messages is None):
        raise ConfigError(f'{where}: write one of {{"prompt": "…"}} and {{"messages": [...]}}')
    if line.messages is not None and api != "chat":
        raise ConfigError(f"{where}: it has messages, which take --api chat, not {api}")
    if line.messages == [] or line.prompt == "":
        raise ConfigError(f"{where}: it is empty")
    if line.max_tokens is not None and line.max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens is below 1")
    return line


class Prompts:
    """Conversations by number: the same number and seed give the same one, in any process."""

    def __init__(self, asking: Asking, seed: int) -> None:
        self.asking = asking
        self._seed = seed
        self._lines = None
        if asking.dataset is not None:
            self._lines = read_dataset(Path(asking.dataset), asking.api)
        source = random.Random(f"corpus {seed}")
        self._corpus = "" if self._lines else " ".join(source.choices(_WORDS, k=_CORPUS_WORDS))
        self._prefixes = [self._prefix(number) for number in range(asking.prefixes)]

    def conversation(self, number: int) -> Conversation:
        source = random.Random(f"{self._seed} {number}")
        line = None if self._lines is None else self._lines[number % len(self._lines)]
        return Conversation(self, number, source, line)

    def make_text(self, tag: str, tokens: float, source: random.Random) -> str:
        """Return about `tokens` tokens of text. It starts with the tag, so that no two texts begin
        alike.
        """
        size = max(1, round(tokens * self.asking.token_chars))
        at = source.randrange(len(self._corpus))
        text = f"{tag} {self._corpus[at : at + size]}"
        while len(text) < size:
            text += self._corpus[: size - len(text)]
        return text[:size]

    def first(self, number: int, source: random.Random) -> str:
        """Return the first prompt of a conversation, after its shared prefix."""
        wanted = self.asking.prompt_tokens.draw(source) - self.asking.overhead_tokens
        text = self.make_text(f"{number:x}", max(1.0, wanted), source)
        prefix = self._prefixes[number % len(self._prefixes)]
        return f"{prefix} {text}" if prefix else text

    def _prefix(self, number: int) -> str:
        tokens = self.asking.shared_prefix_tokens
        source = random.Random(f"prefix {self._seed} {number}")
        return self.make_text(f"p{number:x}", tokens, source) if tokens and self._corpus else ""


class Conversation:
    """The requests of one conversation, one after another."""

    __slots__ = ("_line", "_messages", "_number", "_prompts", "_said", "_source", "left")

    def __init__(
        self, prompts: Prompts, number: int, source: random.Random, line: DatasetLine | None
    ) -> None:
        self._prompts = prompts
        self._number = number
        self._source = source
        self._line = line
        self._messages: list[dict[str, object]] = []
        self._said = ""  # the text so far, for the completions API
        self.left = 1 if line is not None else prompts.asking.turns.draw(source)

    def next_body(self, answer: str = "") -> bytes:
        """Return the next request body. `answer` is the text of the previous answer."""
        self.left -= 1
        asking = self._prompts.asking
        fields: dict[str, object] = {"model": asking.model, **self._content(answer)}
        if asking.api != "embeddings":
            line_limit = None if self._line is None else self._line.max_tokens
            fields["max_tokens"] = line_limit or asking.output_tokens.draw(self._source)
            fields["temperature"] = 0
            if asking.ignore_eos:
                fields["ignore_eos"] = True
            if asking.stream:
                fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(fields | asking.extra)

    def _content(self, answer: str) -> dict[str, object]:
        api = self._prompts.asking.api
        if self._line is not None and self._line.messages is not None:
            return {"messages": self._line.messages}
        if api == "embeddings":
            return {"input": self._turn()}
        if api == "completions":
            self._said += f"{answer}\n{self._turn()}" if self._said else self._turn()
            return {"prompt": self._said}
        if self._messages:
            self._messages.append({"role": "assistant", "content": answer})
        self._messages.append({"role": "user", "content": self._turn()})
        return {"messages": self._messages}

    def _turn(self) -> str:
        """Return the user's next text."""
        if self._line is not None:
            return self._line.prompt or ""
        if not self._messages and not self._said:
            return self._prompts.first(self._number, self._source)
        tokens = self._prompts.asking.prompt_tokens.draw(self._source)
        return self._prompts.make_text("and", tokens, self._source)
