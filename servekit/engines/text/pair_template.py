"""The prompt of a reranker: a chat template whose roles are `query` and `document`.

The roles are those of sentence-transformers and vLLM; an instruction is the message of the role
`system`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from servekit.engines.model_files.model_kind import ModelKind, read_json, read_score_tokens
from servekit.errors import LoadError, RequestError
from servekit.protocol.messages import WorkerSpec

#: The prompt in the model card of Qwen3-Reranker.
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {{ messages[0].content if messages[0].role == 'system' else"
    " 'Given a web search query, retrieve relevant passages that answer the query' }}\n"
    "<Query>: {{ messages[-2].content }}\n<Document>: {{ messages[-1].content }}"
    '<|im_end|>\n<|im_start|>assistant\n{{ "<think>\\n\\n</think>\\n\\n" }}'
)
#: The model types of which that prompt is.
_QWEN3 = ("qwen3",)
#: Texts that occur in no template, to see where it has the texts of a pair.
_QUERY, _DOCUMENT, _INSTRUCTION = "sentinel_query", "sentinel_document", "sentinel_instruction"
_EXAMPLE = (
    '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}, and'
    " the same for document"
)


class FilledPrompt(NamedTuple):
    """The prompt of a pair, with the places of its two texts, if the template keeps them."""

    text: str
    places: tuple[range, range] | None


class PairTemplate:
    """The template of a reranker's prompts."""

    def __init__(
        self, tokenizer: Any, source: str, arguments: Mapping[str, Any], instruction: str = ""
    ) -> None:
        """Store the template's source, its arguments, and the default instruction.

        Raises LoadError for a template that drops the query or the document.
        """
        self._tokenizer = tokenizer
        self._source = source
        self._arguments = {"add_generation_prompt": False} | dict(arguments)
        self._instruction = instruction
        self._parts = False  # contents are lists of parts
        self._known: tuple[str, tuple[str, str, str]] | None = None  # of the last instruction
        if not self._carries_texts():
            self._parts = True
        if not self._carries_texts():
            raise LoadError(
                "The chat template drops the messages of the roles query and document, so it makes"
                f" no prompt for a reranker; one that does has {_EXAMPLE}."
            )

    @property
    def takes_instruction(self) -> bool:
        """Return whether the template shows an instruction."""
        return _INSTRUCTION in self._try_render(_QUERY, _DOCUMENT, _INSTRUCTION)

    def render_pair(self, query: str, document: str, instruction: str = "") -> FilledPrompt:
        """Return the prompt of a pair; "" stands for the default instruction.

        Raises RequestError if the template refuses.
        """
        told = instruction or self._instruction
        try:
            text = self._render(query, document, told)
        except Exception as error:  # the template is the model's code, and may raise anything
            raise RequestError(f"The reranker's template refuses this pair: {error}") from error
        begin, between, end = self._split(told)
        if text != "".join((begin, query, between, document, end)):
            return FilledPrompt(text, None)
        first = range(len(begin), len(begin) + len(query))
        start = first.stop + len(between)
        return FilledPrompt(text, (first, range(start, start + len(document))))

    def _split(self, instruction: str) -> tuple[str, str, str]:
        """Return the texts around query and document, if they stand in this order."""
        if self._known is None or self._known[0] != instruction:
            begin, _, rest = self._try_render(_QUERY, _DOCUMENT, instruction).partition(_QUERY)
            between, _, end = rest.partition(_DOCUMENT)
            self._known = instruction, (begin, between, end)
        return self._known[1]

    def _carries_texts(self) -> bool:
        text = self._try_render(_QUERY, _DOCUMENT, self._instruction)
        return _QUERY in text and _DOCUMENT in text

    def _try_render(self, *texts: str) -> str:
        try:
            return self._render(*texts)
        except Exception:  # the template is the model's code, and may raise anything
            return ""

    def _render(self, query: str, document: str, instruction: str) -> str:
        told = {"system": instruction} if instruction else {}
        roles = told | {"query": query, "document": document}
        messages = [{"role": role, "content": self._form(text)} for role, text in roles.items()]
        return str(
            self._tokenizer.apply_chat_template(
                messages, chat_template=self._source, tokenize=False, **self._arguments
            )
        )

    def _form(self, text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}] if self._parts else text


def find_pair_template(
    folder: Path, spec: WorkerSpec, kind: ModelKind, tokenizer: Any
) -> PairTemplate | None:
    """Return the template that the configuration, or a model's files, name for pairs of texts.

    None for a model that reads the texts of a pair as its tokenizer joins them. Raises LoadError.
    """
    if kind not in ("classify", "rerank"):
        return None
    stated = _read_object(folder / "sentence_bert_config.json")
    own = "message" in (stated.get("modality_config") or {})
    if spec.chat_template or own:
        source = tokenizer.chat_template or ""
        kinds = stated.get("processing_kwargs") or {}
        return PairTemplate(
            tokenizer,
            source,
            kinds.get("chat_template") or {},
            _default_prompt(_read_object(folder / "config_sentence_transformers.json")),
        )
    if kind == "classify" or read_score_tokens(folder) is not None:
        return None
    if _read_object(folder / "config.json").get("model_type") not in _QWEN3:
        raise LoadError(
            f"The files of {spec.model} have no prompt for a reranker: write chat_template with one"
            f" that has {_EXAMPLE}."
        )
    return PairTemplate(tokenizer, QWEN3, {})


def _read_object(path: Path) -> dict[str, Any]:
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def _default_prompt(stated: dict[str, Any]) -> str:
    """Return the instruction that sentence-transformers takes by default."""
    prompts = stated.get("prompts")
    name = stated.get("default_prompt_name")
    return str(prompts.get(name) or "") if isinstance(prompts, dict) else ""
