"""A running engine for tests, and the tiny random model it runs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MllamaConfig,
    PreTrainedTokenizerFast,
)

from servekit.engines.api.base import Job, StepOutput
from servekit.engines.transformers.engine import TransformersEngine
from servekit.protocol.messages import (
    ChatMessage,
    Grammar,
    ModelInfo,
    Progress,
    SamplingParams,
    TokenLogprob,
    WorkerSpec,
)

# Two of the threads that share a tiny matrix wait for each other where other tests take the cores.
torch.set_num_threads(1)

DEADLINE_S = 120.0
PROMPTS = [
    "The quick brown fox",
    "def f(x): return",
    "Größe, naïve café",
    "1234567890 1234567890 1234567890",
    "jumps over the lazy dog. " * 8,
]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('only system, user and assistant may speak') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Größe, naïve café; 東京 北京 서울 Москва עברית हिन्दी 🎉🚀👩‍👩‍👧",
    "def f(x): return x + 1  # 1234567890",
]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A BPE over bytes, as GPT-2, Llama 3 and SmolLM2 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    make: Any = PreTrainedTokenizerFast  # untyped in the library
    fast: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def write_tiny_llama(folder: Path, hidden_size: int = 64, spare_tokens: int = 0) -> Path:
    """A random Llama with two layers, 512 tokens of context and logits that rarely tie.

    `spare_tokens` are rows of its embedding that its tokenizer does not know.
    """
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + spare_tokens,
        hidden_size=hidden_size,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_tiny_mllama(folder: Path) -> Path:
    """A random model with eight rows more in its embedding than in its head, as Mllama has them."""
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "cross_attention_layers": [],
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = MllamaConfig(text_config=text)
    make: Any = AutoModelForCausalLM.from_config  # untyped in the library
    model = make(config)
    model.save_pretrained(folder)
    config.save_pretrained(folder)
    return folder


def make_spec(path: Path | str, **fields: Any) -> WorkerSpec:
    options = {"threads": 1} | fields.pop("options", {})
    known: dict[str, Any] = {
        "name": "model/0",
        "model": "model",
        "engine": "transformers",
        "path": str(path),
        "revision": None,
        "device": "cpu",
        "dtype": "auto",
        "max_context": None,
        "trust_remote_code": False,
        "sampling": {},
        "options": options,
        "socket": "",
    }
    return WorkerSpec(**known | fields)


class Harness:
    """An engine that runs, and what it has emitted, by job."""

    def __init__(
        self, spec: WorkerSpec, kind: Callable[[WorkerSpec], Any] = TransformersEngine
    ) -> None:
        self.engine: Any = kind(spec)
        self.progress: list[Progress] = []
        self.info: ModelInfo = self.engine.load(self.progress.append)
        self.outputs: dict[int, list[StepOutput]] = {}
        self.batches: list[list[StepOutput]] = []
        self._changed = threading.Condition()
        self._last = 0
        self.engine.start(self._emit)

    def _emit(self, outputs: Sequence[StepOutput]) -> None:
        with self._changed:
            self.batches.append(list(outputs))
            for output in outputs:
                self.outputs.setdefault(output.id, []).append(output)
            self._changed.notify_all()

    def submit(
        self,
        prompt: str | list[int],
        emitted: Sequence[int] = (),
        adapter: str = "",
        cache_salt: str = "",
        media: object | None = None,
        **params: Any,
    ) -> int:
        self._last += 1
        ids = self.engine.codec.encode(prompt) if isinstance(prompt, str) else prompt
        sampling = SamplingParams(**{"max_tokens": 16, "temperature": 0.0} | params)
        job = Job(self._last, ids, sampling, list(emitted), None, adapter, (), cache_salt, media)
        if sampling.grammar is not None:
            job.constraint = self.engine.constrain(sampling.grammar, emitted)
        self.engine.submit(job)
        return self._last

    def until(self, happened: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(happened, DEADLINE_S):
                raise AssertionError(f"waited {DEADLINE_S} s in vain until {what}")

    def tokens(self, job_id: int) -> list[int]:
        """Wait for the end; the token ids. Fails on an error."""
        self.until(lambda: self.ended(job_id), f"job {job_id} ends")
        errors = [output.error for output in self.outputs[job_id] if output.error]
        assert not errors, errors
        return [token for output in self.outputs[job_id] for token in output.token_ids]

    def text(self, job_id: int) -> str:
        decoder = self.engine.codec.decoder()
        text: str = decoder.push(self.tokens(job_id)) + decoder.flush()
        return text

    def logprobs(self, job_id: int) -> list[TokenLogprob]:
        self.tokens(job_id)
        return [one for output in self.outputs[job_id] for one in output.logprobs or ()]

    def vectors(self, job_id: int) -> list[list[float]]:
        """The vectors of a job to embed, or the scores of one to classify, at its end."""
        self.until(lambda: self.ended(job_id), "the vectors are there")
        (output,) = self.outputs[job_id]
        assert (output.finish, output.error, output.token_ids) == ("stop", None, [])
        return [np.frombuffer(one, "<f4").tolist() for one in output.vectors or ()]

    def ended(self, job_id: int) -> bool:
        last = self.outputs.get(job_id, [])[-1:]
        return bool(last) and (last[0].finish is not None or last[0].error is not None)

    def finish(self, job_id: int) -> str | None:
        self.tokens(job_id)
        return self.outputs[job_id][-1].finish

    def generate(self, prompt: str | list[int], **params: Any) -> list[int]:
        return self.tokens(self.submit(prompt, **params))

    def until_idle(self) -> None:
        """The loop has carried out every command and nothing is left in the runner."""
        engine = self.engine
        self.until_true(
            lambda: not (engine._commands or engine._runner.running or engine._runner.waiting)
        )

    @staticmethod
    def until_true(happened: Callable[[], bool]) -> None:
        """Poll what is changed without an emission."""
        deadline = time.monotonic() + DEADLINE_S
        while not happened():
            assert time.monotonic() < deadline, "waited in vain"
            threading.Event().wait(0.002)

    def count_steps(self) -> Callable[[], int]:
        """How many steps the runner takes from now on: a cancelled job is worth none.

        Its outputs do not show whether it goes on: the engine keeps them to itself.
        """
        runner, taken = self.engine._runner, [0]
        step = runner.step

        def counted() -> Any:
            taken[0] += 1
            return step()

        runner.step = counted
        return lambda: taken[0]

    def close(self) -> None:
        self.engine.close()


def reference(folder: Path, prompts: list[str], count: int) -> list[list[int]]:
    """What the library's own `generate` says, greedily, each prompt alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        whole = model.generate(
            **ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answers.append(whole[0, ids["input_ids"].shape[1] :].tolist())
    return answers


def assert_alive(harness: Harness) -> None:
    """The loop lives on and serves the next request."""
    assert len(harness.generate(PROMPTS[1], max_tokens=3, ignore_eos=True)) == 3
    assert harness.engine.fatal is None


def assert_dead_end_is_its_own(harness: Harness, max_tokens: int) -> int:
    """A grammar that grows too complex on its way fails its request, not the others; its job."""
    many = {"type": "object", "properties": {f"k{n}": {"type": "null"} for n in range(2600)}}
    late = {"late": {"const": "x" * 60}, "inside": many}
    schema = {"type": "object", "properties": late, "required": [*late]}
    grammar = Grammar("json_schema", json.dumps(schema | {"additionalProperties": False}))
    beside = harness.submit(PROMPTS[0], max_tokens=20, ignore_eos=True)
    job = harness.submit(PROMPTS[0], grammar=grammar, max_tokens=max_tokens)
    harness.until(lambda: harness.ended(job), "it has ended")
    last = harness.outputs[job][-1]
    assert last.error == "The JSON schema cannot be followed: it is too complex."
    assert last.param == "response_format"
    assert len(harness.tokens(beside)) == 20
    return job


class Seeing(Harness):
    """An engine whose model reads images or recordings, and what conversations it is asked."""

    TOKENS = 24  # of an answer

    def ask(self, messages: list[ChatMessage], **params: Any) -> int:
        """Submit a conversation as a worker does."""
        made = {"max_tokens": self.TOKENS, "ignore_eos": True} | params
        if any(one.media for one in messages):
            prompt = self.engine.encode_media(messages, (), {}, False)
            return self.submit(prompt.ids, media=prompt.inputs, **made)
        return self.submit(self.engine.codec.render_chat(messages), **made)

    def answer(self, messages: list[ChatMessage], **params: Any) -> list[int]:
        return self.tokens(self.ask(messages, **params))
