"""Embeddings: those of the plain model, alone and in any company."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from servekit.engines.api.base import EmbedJob, Job
from servekit.engines.api.job_state import EmbedRow
from servekit.engines.transformers.pooling_models.embedding import PoolingRunner
from servekit.errors import ContextLengthExceeded, LoadError, RequestError, Unsupported
from servekit.protocol.messages import SamplingParams
from tests.unit.engines.harness import CORPUS, Harness, byte_level_tokenizer
from tests.unit.engines.transformers.pooling_models.test_pooling import write

Make = Callable[..., Harness]
TEXTS = [*CORPUS, "a", "jumps over the lazy dog. " * 6, "Москва"]
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.4,
}


def tokenizer(folder: Path, pad: int = 0) -> PreTrainedTokenizerFast:
    fast = byte_level_tokenizer()
    fast.pad_token_id = pad
    fast.padding_side = "left"  # as Qwen3-Embedding has it
    fast.save_pretrained(folder)
    return fast


def bert(folder: Path) -> Path:
    fast = tokenizer(folder)
    torch.manual_seed(1)
    config = BertConfig(vocab_size=len(fast), max_position_embeddings=128, **SMALL)
    BertModel(config).save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    return write(folder, {"pooling_mode_mean_tokens": True}, "Normalize")


def roberta(folder: Path) -> Path:
    fast = tokenizer(folder, pad=1)
    torch.manual_seed(2)
    config = XLMRobertaConfig(
        vocab_size=len(fast), max_position_embeddings=130, pad_token_id=1, **SMALL
    )
    XLMRobertaModel(config).save_pretrained(folder)
    return write(folder, {"pooling_mode_cls_token": True})


def qwen3(folder: Path) -> Path:
    fast = tokenizer(folder)
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(fast),
        max_position_embeddings=256,
        num_key_value_heads=2,
        head_dim=8,
        **SMALL,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return write(folder, {"pooling_mode": "lasttoken"}, "Normalize")


MODELS = {"bert": (bert, 100), "roberta": (roberta, 128), "qwen3": (qwen3, 256)}


def plain(folder: Path, ids: list[int]) -> torch.Tensor:
    """The vector by the library alone, one text at a time, and sentence-transformers' formulas."""
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    pooled: dict[str, torch.Tensor] = {
        "bert": torch.nn.functional.normalize(hidden.mean(0), dim=0),
        "roberta": hidden[0],
        "qwen3": torch.nn.functional.normalize(hidden[-1], dim=0),
    }
    return pooled[folder.name]


def submit(harness: Harness, texts: Sequence[str | list[int]]) -> int:
    harness._last += 1
    encode = harness.engine.codec.encode
    ids = [encode(text) if isinstance(text, str) else text for text in texts]
    harness.engine.embed(EmbedJob(harness._last, ids))
    return harness._last


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / str(request.param)
    folder.mkdir()
    return MODELS[request.param][0](folder)


@pytest.fixture(scope="module")
def embedder(model: Path) -> Iterator[Harness]:
    from tests.unit.engines.harness import make_spec

    running = Harness(make_spec(model))
    yield running
    running.close()


def test_it_says_what_it_is(embedder: Harness, model: Path) -> None:
    info = embedder.info
    assert info.serves == ("embed", "tokenize", "detokenize")
    assert (info.embedding_size, info.dtype, info.chat) == (32, "float32", False)
    assert info.max_context == MODELS[model.name][1]
    assert info.parameters > 10_000


def test_the_vectors_are_those_of_the_plain_model(embedder: Harness, model: Path) -> None:
    found = embedder.vectors(submit(embedder, TEXTS))
    for text, vector in zip(TEXTS, found, strict=True):
        expected = plain(model, embedder.engine.codec.encode(text))
        assert vector == pytest.approx(expected.tolist(), abs=2e-5)


def test_a_text_has_the_same_vector_alone_and_in_any_company(embedder: Harness) -> None:
    alone = [embedder.vectors(submit(embedder, [text]))[0] for text in TEXTS]
    jobs = [submit(embedder, TEXTS[turn:] + TEXTS[:turn]) for turn in range(len(TEXTS))]
    for turn, job in enumerate(jobs):
        for expected, vector in zip(
            alone[turn:] + alone[:turn], embedder.vectors(job), strict=True
        ):
            assert vector == pytest.approx(expected, abs=1e-5)


def test_the_longest_text_there_may_be(embedder: Harness) -> None:
    limit = embedder.info.max_context
    assert len(embedder.vectors(submit(embedder, [[5] * limit]))) == 1
    with pytest.raises(ContextLengthExceeded):
        submit(embedder, [[5], [5] * (limit + 1)])
    with pytest.raises(RequestError, match="-1"):
        submit(embedder, [[5, -1]])
    with pytest.raises(RequestError):
        submit(embedder, [[]])
    assert len(embedder.vectors(submit(embedder, ["still there"]))) == 1


def test_it_generates_nothing(embedder: Harness) -> None:
    with pytest.raises(Unsupported, match="does not generate"):
        embedder.engine.submit(Job(10**6, [5], SamplingParams(max_tokens=1)))


def test_a_language_model_makes_no_embeddings(tiny: Harness) -> None:
    assert "embed" not in tiny.info.serves and "generate" in tiny.info.serves
    with pytest.raises(Unsupported, match="no pooling"):
        submit(tiny, ["a"])


def test_requests_take_turns(harness: Make, tmp_path: Path) -> None:
    """A single text does not wait for the thousand that came before it."""
    one = harness(bert(tmp_path), options={"max_batch_tokens": 64})
    crowd = submit(one, ["jumps over the lazy dog. "] * 400)
    single = submit(one, ["a"])
    one.vectors(single)
    assert crowd not in one.outputs
    assert one.engine.load_now().running == 1
    assert len(one.vectors(crowd)) == 400
    one.until_true(lambda: one.engine.load_now().running == 0)


def test_a_cancelled_request_makes_room(harness: Make, tmp_path: Path) -> None:
    one = harness(bert(tmp_path), options={"max_batch_tokens": 64})
    crowd = submit(one, ["jumps over the lazy dog. "] * 400)
    one.until_true(lambda: one.engine._runner.running)
    one.engine.cancel(crowd)
    steps = one.count_steps()
    assert len(one.vectors(submit(one, ["a"]))) == 1
    assert crowd not in one.outputs
    one.until_idle()
    assert steps() < 20, "nothing of it was embedded, neither before nor after"
    assert one.engine.load_now().progress_age_s == 0


def test_progress_is_each_batch(
    harness: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = harness(bert(tmp_path), options={"max_batch_tokens": 64})
    go = threading.Event()
    step = one.engine._runner.step

    def stalled() -> Any:
        go.wait()
        return step()

    monkeypatch.setattr(one.engine._runner, "step", stalled)
    job = submit(one, ["a"])
    first = one.engine.load_now().progress_age_s
    one.until_true(lambda: one.engine.load_now().progress_age_s > first + 0.05)
    go.set()
    one.vectors(job)
    one.until_true(lambda: one.engine.load_now().progress_age_s == 0)


def test_an_encoder_that_does_not_say_how_to_pool_is_refused(harness: Make, tmp_path: Path) -> None:
    folder = bert(tmp_path)
    (folder / "modules.json").unlink()
    with pytest.raises(LoadError, match=r"BertModel cannot generate text.*modules\.json"):
        harness(folder)


def test_what_its_files_say_wrong_is_a_load_error(harness: Make, tmp_path: Path) -> None:
    folder = bert(tmp_path)
    (folder / "modules.json").write_text("{")
    with pytest.raises(LoadError, match="does not say how to make embeddings"):
        harness(folder)
    (folder / "modules.json").write_text(json.dumps([{"type": "x.Transformer", "path": "0_T"}]))
    with pytest.raises(LoadError, match="0_T"):
        harness(folder)


def drop_weights(folder: Path, *parts: str) -> None:
    """Take the tensors whose names have one of the parts out of the model's file."""
    path = folder / "model.safetensors"
    kept = {
        name: tensor
        for name, tensor in load_file(path).items()
        if not any(part in name for part in parts)
    }
    save_file(kept, path, metadata={"format": "pt"})


def test_embeddings_by_weights_that_the_library_would_draw_are_refused(
    harness: Make, tmp_path: Path
) -> None:
    folder = bert(tmp_path)
    drop_weights(folder, "layer.1.attention.self.query")
    with pytest.raises(LoadError, match=r"layer\.1\.attention\.self\.query.*lack 2 .*random"):
        harness(folder)


def test_no_pooler_is_needed(harness: Make, tmp_path: Path) -> None:
    folder = bert(tmp_path)
    drop_weights(folder, "pooler")
    one = harness(folder)
    (vector,) = one.vectors(submit(one, ["a"]))
    assert len(vector) == SMALL["hidden_size"]


def test_no_decoder_is_needed(harness: Make, tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    library: Any = transformers  # untyped in part
    own = library.T5Config(vocab_size=len(tokenizer(tmp_path)), **sizes)
    library.T5EncoderModel(own).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))
    one = harness(write(tmp_path, {"pooling_mode_mean_tokens": True}))
    (vector,) = one.vectors(submit(one, ["a"]))
    assert len(vector) == 32


class Recorder(PoolingRunner):
    """A runner that notes the lengths of each batch, by row."""

    def __init__(self, budget: int) -> None:
        model: Any = SimpleNamespace(device=torch.device("cpu"))
        super().__init__(model, 0, 512, budget)
        self.batches: list[list[tuple[int, int]]] = []

    def run_batch(self, batch: list[tuple[EmbedRow, int]]) -> list[bytes]:
        self.batches.append([(row.job.id, len(row.job.inputs[at])) for row, at in batch])
        return [bytes(4)] * len(batch)

    def embed(self, texts: list[list[int]]) -> list[bytes]:
        raise NotImplementedError

    def run_forward(self, ids: Tensor, mask: Tensor, types: Tensor | None) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def run_rows(self, *lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Return the batches of rows with texts of these lengths; the rows count from 0."""
        for id, row in enumerate(lengths):
            self.add(EmbedRow(str(id), EmbedJob(id, [[1] * length for length in row])))
        done: list[int] = []
        while self.running:
            done += [row.job.id for row, _ in self.step()]
        assert sorted(done) == list(range(len(lengths)))
        return self.batches


def test_a_batch_has_texts_of_similar_length_of_all_requests() -> None:
    long = [100, 97, 76]
    batches = Recorder(1000).run_rows([*long, 10, 11], [*long, 12, 13], [9])
    assert batches[0] == [(0, 100), (0, 97), (0, 76), (1, 100), (1, 97), (1, 76)]
    assert sorted(batches[1]) == [(0, 10), (0, 11), (1, 12), (1, 13), (2, 9)]
    assert len(batches) == 2


def test_a_small_batch_is_filled_with_shorter_texts() -> None:
    batches = Recorder(1000).run_rows([100, 10, 10])
    assert batches == [[(0, 100), (0, 10)], [(0, 10)]]  # up to a quarter of the most tokens


def test_each_request_has_its_turn_whatever_comes_beside_it() -> None:
    batches = Recorder(100).run_rows([100] * 5, [50], [3])
    assert batches.index([(1, 50)]) == 1
    assert batches.index([(2, 3)]) == 2


def test_no_batch_has_more_tokens_than_fit_unless_it_is_one_text() -> None:
    source = random.Random(3)
    rows = [[source.randint(1, 300) for _ in range(source.randint(1, 40))] for _ in range(20)]
    batches = Recorder(1000).run_rows(*rows)
    sizes = [len(batch) * max(length for _, length in batch) for batch in batches]
    assert max(sizes) <= 1000
    assert sorted(one for batch in batches for one in batch) == sorted(
        (id, length) for id, row in enumerate(rows) for length in row
    )
    tokens = sum(map(sum, rows))
    assert sum(sizes) < 1.2 * tokens
    assert Recorder(100).run_rows([300, 200], [5]) == [[(0, 300)], [(1, 5)], [(0, 200)]]
