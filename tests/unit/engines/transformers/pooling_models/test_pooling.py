"""The formulas of sentence-transformers by hand, and what its files may say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from servekit.engines.transformers.pooling_models import pooling
from servekit.errors import LoadError

CPU = torch.device("cpu")
STATES = torch.tensor(
    [[[1.0, 5.0], [3.0, -1.0], [8.0, 2.0]], [[2.0, 4.0], [4.0, 0.0], [99.0, 99.0]]]
)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
EXPECTED = {
    "cls": [[1.0, 5.0], [2.0, 4.0]],
    "max": [[8.0, 5.0], [4.0, 4.0]],
    "mean": [[4.0, 2.0], [3.0, 2.0]],
    "mean_sqrt_len_tokens": [
        [12 / math.sqrt(3), 6 / math.sqrt(3)],
        [6 / math.sqrt(2), 4 / math.sqrt(2)],
    ],
    "weightedmean": [[(1 + 6 + 24) / 6, (5 - 2 + 6) / 6], [(2 + 8) / 3, 4 / 3]],
    "lasttoken": [[8.0, 2.0], [4.0, 0.0]],
}
SWITCHES = {name: switch for name, (switch, _) in pooling._MODES.items()}


def write(folder: Path, config: dict[str, Any], *after: str) -> Path:
    """A folder's modules: the transformer, the pooling by `config`, and what comes `after`."""
    kinds = ["Transformer", "Pooling", *after]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": "" if number == 0 else f"{number}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("by_name", [True, False])
def test_each_formula(tmp_path: Path, name: str, by_name: bool) -> None:
    config = {"pooling_mode": name} if by_name else {SWITCHES[name]: True}
    others = {} if by_name else {s: False for n, s in SWITCHES.items() if n != name}
    found = pooling.read_pooling(write(tmp_path, config | others), CPU)(STATES, MASK)
    torch.testing.assert_close(found, torch.tensor(EXPECTED[name]))
    assert found.dtype == torch.float32


def test_several_are_joined_in_their_order(tmp_path: Path) -> None:
    config = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    found = pooling.read_pooling(write(tmp_path, config), CPU)(STATES, MASK)
    assert found.tolist() == [[1.0, 5.0, 4.0, 2.0], [2.0, 4.0, 3.0, 2.0]]


def test_dense_layers_and_a_normalisation_follow(tmp_path: Path) -> None:
    folder = write(tmp_path, {"pooling_mode": "cls"}, "Dense", "Normalize")
    (folder / "2_Dense").mkdir()
    weight, bias = (
        torch.tensor([[1.0, 0.5], [0.0, -1.0], [2.0, 0.0]]),
        torch.tensor([0.1, 0.2, 0.3]),
    )
    save_file(
        {"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors"
    )
    config = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
    expected = torch.tanh(STATES[:, 0] @ weight.T + bias)
    expected /= expected.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(pooling.read_pooling(folder, CPU)(STATES, MASK), expected)


def test_half_precision_is_pooled_in_full() -> None:
    states = torch.full((1, 5000, 1), 1.0, dtype=torch.bfloat16)
    how = pooling.Pooling((pooling._pool_mean,), (), None)
    assert how(states, torch.ones(1, 5000)).item() == 1.0


def test_the_longest_text_is_read_where_it_stands(tmp_path: Path) -> None:
    folder = write(tmp_path, {"pooling_mode": "cls"})
    assert pooling.read_pooling(folder, CPU).max_tokens is None
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert pooling.read_pooling(folder, CPU).max_tokens == 256


@pytest.mark.parametrize(
    ("config", "after", "reason"),
    [
        ({}, (), "does not name a pooling"),
        ({"pooling_mode": "attention"}, (), "attention"),
        ({"pooling_mode": "cls"}, ("LSTM",), "LSTM"),
        ({"pooling_mode": "cls"}, ("Dense",), r"model\.safetensors"),
        ([], (), "does not say"),
    ],
)
def test_what_is_not_known_is_named(
    tmp_path: Path, config: Any, after: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(LoadError, match=reason):
        pooling.read_pooling(write(tmp_path, config, *after), CPU)


@pytest.mark.parametrize("name", ["os.system", "torch.nn.functional.tanh", "torch.nn.nothing"])
def test_only_torchs_own_activations_are_made(name: str) -> None:
    with pytest.raises(LoadError, match="not supported"):
        pooling.find_activation(name)
