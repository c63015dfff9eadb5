"""Inside the processes that run the model: parts that a build for CPUs does not reach by itself."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from servekit.config.engines.installed import is_there
from servekit.config.engines.options import KINDS
from servekit.engines.vllm.requests import DONE

pytestmark = [
    pytest.mark.lane("vllm"),
    pytest.mark.timeout(300),  # vLLM is imported
    pytest.mark.skipif(
        not (is_there("vllm") and KINDS["vllm"].is_for_cpus), reason="no vLLM built for CPUs"
    ),
]


class Lengths:
    """As vLLM's `UvaBackedTensor`: written by the host, and seen by the GPU once it is copied."""

    def __init__(self, size: int, dtype: Any = None) -> None:
        self.np = np.zeros(size, dtype=np.int32)
        self.gpu = self.np.copy()

    def copy_to_uva(self) -> None:
        self.gpu = self.np.copy()


class Kernel:
    """As the second model runner's `BadWordsState`, with what its kernel compares."""

    def __init__(self, req_states: Any) -> None:
        self.req_states = req_states
        self.words: dict[int, list[list[int]]] = {}

    def add_request(self, at: int, params: Any) -> bool:
        self.words[at] = params.bad_words_token_ids
        return bool(self.words[at])

    def apply_staged_writes(self) -> None:
        """Of words only: the lengths are the request states' own."""

    def banned(self, at: int) -> set[int]:
        said = self.req_states.all_token_ids[at][self.req_states.prompt_len.gpu[at] :]
        return {
            word[-1]
            for word in self.words[at]
            if len(said) >= len(word) - 1 and said[len(said) - len(word) + 1 :] == word[:-1]
        }


@dataclass(frozen=True)
class FrozenStates:
    """The request states as later releases pass them to logits processors."""

    prompt_len: Lengths
    all_token_ids: list[list[int]]


@pytest.mark.parametrize("states_of", [SimpleNamespace, FrozenStates])
@pytest.mark.parametrize("name", ["BadWordsState", "PenaltiesState"])
def test_the_second_model_runner_counts_what_another_worker_has_begun(
    monkeypatch: pytest.MonkeyPatch, states_of: Any, name: str
) -> None:
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample import sampler

    from servekit.engines.vllm.core import worker_extension

    monkeypatch.setattr(buffer_utils, "UvaBackedTensor", Lengths)
    monkeypatch.setattr(sampler, "BadWordsState", Kernel)
    monkeypatch.setattr(sampler, "PenaltiesState", Kernel)
    worker_extension.take_up_begun_texts()
    states = states_of(prompt_len=Lengths(2), all_token_ids=[[1, 2, 7, 8], [1, 2, 7, 8]])
    states.prompt_len.np[:] = 4
    states.prompt_len.copy_to_uva()
    kernel = getattr(sampler, name)(states)
    words = [[7, 8, 9], [2, 7, 8, 3], [8, 4], [6]]
    for at, extra in enumerate(({DONE: 2}, None)):
        assert kernel.add_request(at, SimpleNamespace(extra_args=extra, bad_words_token_ids=words))
    kernel.apply_staged_writes()
    assert (kernel.banned(0), kernel.banned(1)) == ({9, 4, 6}, {6})
    assert states.prompt_len.gpu.tolist() == [4, 4], "it is the prompt to all others"


def test_a_seed_is_kept_beside_a_request_without_one() -> None:
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler

    from servekit.engines.vllm.core.worker_extension import keep_seeds

    sampler = topk_topp_sampler.TopKTopPSampler()
    keep_seeds(sampler)
    logits = torch.zeros(2, 5000)

    def draw() -> list[int]:
        seeded = {0: torch.Generator().manual_seed(7)}
        tokens, _ = sampler.forward(logits.clone(), seeded, None, None)
        return [int(token) for token in tokens]

    (first, other), (again, another) = draw(), draw()
    assert first == again and other != another


@pytest.mark.parametrize("compiles", [False, True])
def test_the_way_for_cpus_is_taken_where_it_is_right(compiles: bool) -> None:
    from servekit.engines.vllm.core.worker_extension import keep_seeds

    def right(logits: Any) -> str:
        return "for CPUs"

    def wrong(logits: Any) -> Any:
        return compiled_random_sample(logits)

    way = wrong if compiles else right
    sampler = SimpleNamespace(forward=way, forward_cpu=way, forward_native=lambda logits: "native")
    keep_seeds(sampler)
    assert sampler.forward(0) == ("native" if compiles else "for CPUs")


def compiled_random_sample(logits: Any) -> Any:
    raise AssertionError("this is as up to 0.31")


def test_drafts_are_sampled_by_the_settings_of_their_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from vllm.v1.sample import rejection_sampler

    from servekit.engines.vllm.core.worker_extension import expand_to_drafts

    for name in ("expand_batch_to_tokens", "apply_sampling_constraints"):
        monkeypatch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
    expand_to_drafts()
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    greedy, logits = torch.tensor([0.0, 0.3, 0.5]), torch.arange(20.0).reshape(5, 4)
    settings = SimpleNamespace(
        all_greedy=False,
        temperature=greedy,
        top_k=torch.tensor([4, 1, 2], dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.1, 1.0]),
    )
    seen = rejection_sampler.apply_sampling_constraints(logits.clone(), ends, settings)
    assert torch.equal(seen[:2], logits[:2])
    assert torch.equal(seen[2:, 2:], logits[2:, 2:] / 0.5)
    assert seen[2:, :2].isneginf().all()
    settings.top_p = None
    none = rejection_sampler.apply_sampling_constraints(
        logits[:0], torch.zeros_like(ends), settings
    )
    assert none.shape == (0, 4)


def test_an_adapter_leaves_rows_of_the_base_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their index is -1, which is that of the last slot in vLLM's functions for a CPU."""
    import torch
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    from servekit.engines.vllm.core import worker_extension

    for module in (lora_ops, punica_cpu):
        monkeypatch.setattr(module, "bgmv_shrink", lora_ops.bgmv_shrink)
    worker_extension.skip_rows_of_base()
    inputs, weights = torch.ones(3, 4), torch.ones(1, 2, 4)
    expected = [[8.0, 8.0], [0.0, 0.0], [8.0, 8.0]]
    output = torch.ones(3, 2)
    punica_cpu.bgmv_shrink(inputs, weights, output, torch.tensor([0, -1, 0]), 2.0)
    assert output.tolist() == expected
    output = torch.ones(3, 2)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([1, 1, 1])
    punica_cpu.sgmv_shrink(
        inputs, weights, output, starts, lengths, torch.tensor([0, -1, 0]), 3, 1, 3, 2.0
    )
    assert output.tolist() == expected
