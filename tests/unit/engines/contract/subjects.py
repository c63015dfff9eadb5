"""The engines that keep the contract, and how one of each is made: a new engine adds its row here.

A row says what the engine needs to run a model that is small enough for every test run. What an
engine cannot do it says by `ModelInfo`; `exempt` names the tests that it cannot pass for another
reason, with that reason.

An engine of another package needs no row: with SERVEKIT_CONTRACT=servekit.yaml in the environment
the models of that file are tried instead, on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from servekit.config.engines.options import KINDS
from servekit.config.load import load_config
from servekit.config.schema import ModelConfig
from servekit.protocol.adapters import AdapterSpec
from servekit.protocol.messages import WorkerSpec
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers.worker_spec import make_worker_spec
from tests import markov

#: Few, so that sixty-four jobs have to wait.
SLOTS = 4


@dataclass(frozen=True)
class Subject:
    """One engine under the contract."""

    name: str
    #: Write the model into an empty folder; the spec that loads it.
    spec: Callable[[Path], WorkerSpec]
    #: Without one of these it is skipped.
    modules: tuple[str, ...] = ()
    gpu: bool = False
    #: Write an adapter for the model in the first folder into the second, an empty one.
    adapter: Callable[[Path, Path], AdapterSpec] | None = None
    #: Its package is built for this: vLLM's comes for GPUs or for CPUs.
    build: Literal["", "cpu", "cuda"] = ""
    #: What its package has brought, for `sys.path`; into an empty folder.
    site: Callable[[Path], Path] | None = None
    #: Its arithmetic repeats: the same text alone and in a crowd. Not so in low precision.
    exact: bool = True
    #: After another worker's tokens a seed gives what it would have given without.
    seeds_go_on: bool = True
    #: Names of tests, and why they are not for this engine.
    exempt: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """Why it cannot run here; "" if it can."""
        if self.modules and not any(map(importlib.util.find_spec, self.modules)):
            return f"{' or '.join(self.modules)} is not installed"
        if self.build and (self.build == "cpu") != _vllm_is_for_cpus():
            return f"vLLM is not built for {self.build}"
        if self.gpu:
            import torch

            return "" if torch.cuda.is_available() else "there is no GPU"
        return ""


def _vllm_is_for_cpus() -> bool:
    for name, value in KINDS["vllm"].env.items():
        os.environ.setdefault(name, value)  # as the supervisor does, and before it is imported
    from servekit.engines.vllm import library

    return library.is_for_cpus()


def spec(engine: str, path: Path | str, **fields: Any) -> WorkerSpec:
    """Return what its worker would get: options have their defaults."""
    known: dict[str, Any] = {
        "name": "model/0",
        "model": "model",
        "engine": engine,
        "path": str(path),
        "revision": None,
        "device": "cpu",
        "dtype": "float32",
        "max_context": None,
        "trust_remote_code": False,
        "sampling": {},
        "socket": "",
        "sleeps": True,
    }
    options = KINDS[engine].options.model_validate(fields.pop("options", {}))
    return WorkerSpec(**known | fields | {"options": options.model_dump(exclude_none=True)})


# ---------------------------------------------------------------- the rows


def _echo(folder: Path) -> WorkerSpec:
    return spec("echo", "-", options={"slots": SLOTS, "step_s": 0.001})


def _echo_adapter(model: Path, folder: Path) -> AdapterSpec:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return AdapterSpec("loud", str(folder))


def _transformers(batching: str) -> Callable[[Path], WorkerSpec]:
    def made(folder: Path) -> WorkerSpec:
        from tests.unit.engines.harness import write_tiny_llama

        options = {"threads": 1, "batching": batching}
        options |= {"slots": SLOTS} if batching == "continuous" else {}
        return spec("transformers", write_tiny_llama(folder), options=options)

    return made


def _lora(model: Path, folder: Path) -> AdapterSpec:
    from tests.unit.engines.transformers.lora.making import configs, write

    return AdapterSpec("tuned", str(write(model, folder, configs()["rslora"])))


def _vllm(folder: Path) -> WorkerSpec:
    from tests.unit.engines.harness import write_tiny_llama

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # as the supervisor pins it
    options = {"slots": SLOTS, "enforce_eager": True, "max_loras": 2}
    path = write_tiny_llama(folder, hidden_size=256)  # heads of 64, as its kernels want them
    fields = {"device": "cuda", "dtype": "bfloat16", "memory_bytes": 8 * 2**30}
    return spec("vllm", path, options=options, **fields)


def _vllm_cpu(folder: Path) -> WorkerSpec:
    from tests.unit.engines.harness import write_tiny_llama

    options = {"slots": SLOTS, "max_loras": 2}
    return spec("vllm", write_tiny_llama(folder, hidden_size=256), options=options)


def _llamacpp(folder: Path) -> WorkerSpec:
    from tests.unit.engines.origins import write_tiny_gguf

    path = write_tiny_gguf(folder / "tiny.gguf", float32=True, context=512)
    options = {"threads": 1, "slots": SLOTS, "cache_type": "f32"}
    return spec("llamacpp", path, options=options)


def _markov(folder: Path) -> WorkerSpec:
    options = {"order": 4, "slots": SLOTS}
    return spec("markov", markov.write_corpus(folder), max_context=2**16, options=options)


_ONE_CANDIDATE = "it has one candidate for each token"
_NO_END = "it never ends by itself"


def _of_file(path: Path) -> list[Subject]:
    """Return the models of a configuration file, each with the settings that its worker gets."""

    def spec_of(model: ModelConfig) -> Callable[[Path], WorkerSpec]:
        return lambda folder: make_worker_spec(model, Assignment(model.name, 0, (), None), "")

    return [Subject(model.name, spec_of(model)) for model in load_config(path).models]


_ROWS = [
    Subject(
        "echo",
        _echo,
        adapter=_echo_adapter,
        exempt={
            "test_a_chat_is_rendered_with_all_its_messages": "it repeats the last message",
            "test_one_candidate_is_greedy": _ONE_CANDIDATE,
            "test_an_end_of_its_own_is_stop": _NO_END,
            "test_ignoring_the_end_goes_on": _NO_END,
            "test_the_end_waits_for_min_tokens": _NO_END,
        },
    ),
    Subject("transformers", _transformers("continuous"), adapter=_lora),
    Subject("transformers-static", _transformers("static"), adapter=_lora),
    Subject("vllm", _vllm, modules=("vllm",), gpu=True, build="cuda", adapter=_lora, exact=False),
    Subject("vllm-cpu", _vllm_cpu, modules=("vllm",), build="cpu", adapter=_lora),
    Subject("llamacpp", _llamacpp, modules=("xllamacpp", "llama_cpp")),
    Subject("markov", _markov, site=markov.install),
]
_FILE = os.environ.get("SERVEKIT_CONTRACT")
SUBJECTS = _of_file(Path(_FILE)) if _FILE else _ROWS
