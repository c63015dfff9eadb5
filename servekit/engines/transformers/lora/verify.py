"""Checks that an adapter must pass before it is served, on the device that it will run on.

Alone:
- every tensor is finite and on the worker's device (`peft_model.build_peft_model`);
- its layers have an effect, are accurate, and can be merged (`check_layers`);
- the model's output with the adapter is finite and differs from the base's, for a text, or for an
  image or a recording if the model reads them;
- merged, if that is its mode, the model gives the same output as unmerged;
- if it has its own model, that gives the same output in the paged cache (`manager`).

In the engine's own batch, beside the base and other adapters, while the engine serves: two prompts,
and those with images or recordings, give the same output as alone, and the base and the other
adapters give the same output as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from servekit.engines.api.base import Job
from servekit.engines.transformers.batching.self_check import probe_prompt, relative_error
from servekit.engines.transformers.lora import batching_mode, boft
from servekit.engines.transformers.lora.adapter_files import PARAM
from servekit.engines.transformers.lora.module_clone import ModuleClones, logits_of
from servekit.engines.transformers.vision.image_runner import ImageRunner
from servekit.errors import RequestError

log: Any = structlog.get_logger(__name__)

#: Lengths of the test prompts, and the number of tokens generated for each.
LENGTHS = (5, 11)
TOKENS = 3
#: Maximum size of the weights copied to the CPU; of a larger model every n-th layer is compared.
REFERENCE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The tolerances for two computations of the same result.

    All are relative: the norm of the difference over the norm of the expected result.

        layers   an adapted layer on its device against float32 on the CPU; merged against unmerged
        logits   the whole model: in a batch against alone, merged against unmerged
        noise    effect of rounding on the logits; a smaller effect of an adapter is not detectable

    float32 has 24 bits: a sum of some thousand products is off by 1e-6, more after BOFT's and OFT's
    inverses. On a GPU, with TF32 off, sums have another order and inverses other routines: ten
    times more. bfloat16 has 8 bits, an error of 0.4 % in each rounding; a layer rounds its own
    product, the adapter's, and their sum, and thirty layers add up to some percent. float16 has 11
    bits. Real errors are far larger: a layer without its adapter, with another's, or with zeros is
    off by the adapter's whole effect, against which the error is also compared (`allowed`).
    """

    layers: float
    logits: float
    noise: float

    def allowed(self, effect: float) -> float:
        """Return the tolerance for logits, given the adapter's relative effect on them.

        The result must be nearer to the adapter's logits than to the base's, as far as rounding
        allows.
        """
        return min(self.logits, max(effect / 2, self.noise))


_TABLE = {
    ("cpu", torch.float32): Tolerance(layers=1e-4, logits=1e-3, noise=1e-5),
    ("cuda", torch.float32): Tolerance(layers=1e-3, logits=1e-2, noise=1e-4),
    ("cpu", torch.bfloat16): Tolerance(layers=3e-2, logits=0.15, noise=5e-2),
    ("cuda", torch.bfloat16): Tolerance(layers=3e-2, logits=0.15, noise=5e-2),
    ("cpu", torch.float16): Tolerance(layers=5e-3, logits=5e-2, noise=1e-2),
    ("cuda", torch.float16): Tolerance(layers=5e-3, logits=5e-2, noise=1e-2),
}


def tolerance_of(device: torch.device, dtype: torch.dtype) -> Tolerance:
    """Return the tolerances for a model of this dtype on this device."""
    return _TABLE.get((device.type, dtype), _TABLE["cuda", torch.bfloat16])


# ---------------------------------------------------------------- the whole model


@dataclass(frozen=True, slots=True)
class AdapterOutput:
    """Output of an adapter alone, in the model's plain attention."""

    logits: Tensor  # float32 [tokens, vocabulary], after the longer prompt
    effect: float  # relative to the base's logits
    figures: dict[str, float]
    media: tuple[MediaOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class MediaOutput:
    """Output after a prompt with an image or a recording: logits, float32 [vocabulary]."""

    job: Job
    logits: Tensor
    effect: float


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """Output of a test prompt: `logits` [tokens, vocabulary] before each token of `completion`."""

    completion: tuple[int, ...]
    logits: Tensor


def verify_alone(
    model: Any,
    skeletons: ModuleClones,
    vocab_size: int,
    tolerance: Tolerance,
    media: Sequence[Job] = (),
) -> AdapterOutput:
    """Verify a PeftModel alone, also with prompts of media. Raises RequestError."""
    ids = probe_prompt(LENGTHS[-1], vocab_size)
    said: list[Tensor] = []
    runs = [lambda: said.append(logits_of(model, ids, len(ids)))]
    runs += [partial(_append_logits, said, model, job) for job in media]
    figures = check_layers(model, runs, tolerance)
    if not all(torch.isfinite(logits).all() for logits in said):
        raise RequestError("The model's logits are NaN or Inf with the adapter.", param=PARAM)
    effect = relative_error(said[0], logits_of(skeletons.base, ids, len(ids)))
    seen = tuple(
        MediaOutput(job, logits, relative_error(logits, logits_after_media(skeletons.base, job)))
        for job, logits in zip(media, said[1:], strict=True)
    )
    if not any((effect, *(one.effect for one in seen))):
        raise RequestError(
            "The adapter has no effect: the model's output is the same without it.", param=PARAM
        )
    return AdapterOutput(said[0], effect, figures | {"effect": effect}, seen)


def _append_logits(said: list[Tensor], model: Any, job: Job) -> None:
    try:
        said.append(logits_after_media(model.get_base_model(), job))
    except RequestError:  # of logits that are no numbers: `check_layers` names the layer
        said.append(torch.tensor([torch.nan]))


def logits_after_media(model: Any, job: Job, tokens: Sequence[int] = ()) -> Tensor:
    """Return the logits after a prompt with media and further tokens, float32 [vocabulary]."""
    return ImageRunner(model, capacity=0).logits_after(job, tokens)


def verify_merged(
    model: Any, before: AdapterOutput, vocab_size: int, tolerance: Tolerance
) -> dict[str, float]:
    """Compare a merged model with its output before merging. Raises RequestError."""
    how = "merged into the weights"
    ids = probe_prompt(LENGTHS[-1], vocab_size)
    found = relative_error(logits_of(model, ids, len(ids)), before.logits)
    errors = [_require_agreement(found, before.effect, tolerance, how)]
    for one in before.media:
        found = relative_error(logits_after_media(model, one.job), one.logits)
        errors.append(_require_agreement(found, one.effect, tolerance, how))
    return {"merged_error": max(errors)}


def verify_batched(
    said: Sequence[Tensor], expected: Sequence[Tensor], effect: float, tolerance: Tolerance
) -> float:
    """Compare logits [tokens, vocabulary] from the engine's batch with those computed alone."""
    pairs = zip(said, expected, strict=True)
    found = max((relative_error(a, b) for a, b in pairs), key=lambda value: (value != value, value))
    return _require_agreement(found, effect, tolerance, "in a batch with others")


def verify_undisturbed(
    said: PromptOutput, before: PromptOutput, tolerance: Tolerance, who: str
) -> float:
    """Compare the output of another model beside the adapter with its output without the adapter.

    The comparison ends where the completions diverge: between two almost equally likely tokens
    rounding decides, and the output after another token is rightly different.
    """
    pairs = zip(said.completion, before.completion, strict=True)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    found = relative_error(
        said.logits[: alike + 1], before.logits[: alike + 1].to(said.logits.device)
    )
    if not found <= tolerance.logits:
        raise RequestError(
            f"With the adapter loaded, {who} has other logits: {found:.1%} off.", param=PARAM
        )
    return found


def _require_agreement(found: float, effect: float, tolerance: Tolerance, how: str) -> float:
    # Without an effect, as one on images alone has on texts, there is nothing to be lost.
    allowed = tolerance.allowed(effect) if effect else tolerance.logits
    if not found <= allowed:
        raise RequestError(
            f"The adapter's output differs {how}: its logits are {found:.1e} off, "
            f"where its whole effect is {effect:.1e} and {allowed:.0e} is allowed.",
            param=PARAM,
        )
    return found


# ---------------------------------------------------------------- layer by layer


@dataclass(frozen=True, slots=True)
class Seen:
    """The inputs and output of one layer in one forward pass."""

    name: str
    layer: Any
    given: tuple[Any, ...]
    made: Tensor


@torch.no_grad()
def check_layers(
    model: Any, runs: Sequence[Callable[[], object]], tolerance: Tolerance
) -> dict[str, float]:
    """Run a PeftModel by `runs` and compare its layers; return the measurements by name.

    The inputs of each layer in the first forward pass that reaches it are recorded and passed again
    to

    - the layer that it wraps: an output of zeros, NaN or Inf is then the adapter's fault;
    - a merged copy of the layer;
    - a copy of the layer in float32 on the CPU.

    Raises RequestError with the name of the first wrong layer, or if no layer has any effect.
    """
    seen: list[Seen] = []
    for run in runs:
        seen += _record_layers(model, run, {one.name for one in seen})
    _require_alive(seen)
    if seen and all(torch.equal(one.made, _base_output(one)) for one in seen):
        raise RequestError(
            f"The adapter has no effect: each of its {len(seen)} layers, such as "
            f"{seen[0].name}, has the output of the base's own.",
            param=PARAM,
        )
    chosen = _within_budget(seen)
    figures = {"layers": float(len(seen)), "layers_compared": float(len(chosen))}
    merged = [(one, _merged_error(one)) for one in chosen]
    known = [(one, value) for one, value in merged if value is not None]
    if known:
        figures["merge_error"] = _require_accurate(
            known, tolerance, "its output differs once merged"
        )
    against = [(one, _reference_error(one)) for one in chosen]
    if against:
        what = "it differs from the same layer in float32 on the CPU"
        figures["layer_error"] = _require_accurate(against, tolerance, what)
    return figures


def _record_layers(model: Any, run: Callable[[], object], known: Collection[str]) -> list[Seen]:
    """Return what the layers do in a run, without those of the names that are known."""
    seen: list[Seen] = []
    handles = [
        layer.register_forward_hook(_make_recorder(name, seen))
        for name, layer in batching_mode.tuner_layers(model)
        if name not in known
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _make_recorder(name: str, seen: list[Seen]) -> Callable[[Any, tuple[Any, ...], Any], None]:
    def record(layer: Any, given: tuple[Any, ...], made: Any) -> None:
        if isinstance(made, Tensor):
            seen.append(Seen(name, layer, given, made.detach().clone()))

    return record


def _require_alive(seen: list[Seen]) -> None:
    for one in seen:
        if not torch.isfinite(one.made).all():
            raise RequestError(f"Layer {one.name} gives NaN or Inf with the adapter.", param=PARAM)
        if not one.made.any() and _base_output(one).any():
            raise RequestError(
                f"Layer {one.name} gives only zeros with the adapter, and not without it.",
                param=PARAM,
            )


def _base_output(one: Seen) -> Tensor:
    found: Tensor = one.layer.get_base_layer()(*one.given)
    return found


def _within_budget(seen: list[Seen]) -> list[Seen]:
    held = sum(4 * p.numel() for one in seen for p in one.layer.get_base_layer().parameters())
    stride = -(-held // REFERENCE_BYTES) or 1
    return seen[::stride]


def _require_accurate(measured: list[tuple[Seen, float]], tolerance: Tolerance, what: str) -> float:
    for one, value in measured:
        if not value <= tolerance.layers:  # NaN is no agreement
            raise RequestError(
                f"Layer {one.name} is not right with the adapter: {what}, by {value:.1e} where "
                f"{tolerance.layers:.0e} is rounding.",
                param=PARAM,
            )
    return max(value for _, value in measured)


def _merged_error(one: Seen) -> float | None:
    """Return the relative error of the merged layer; None if the tuner cannot be merged."""
    memo: dict[int, Any] = {id(p): p for p in (*one.layer.parameters(), *one.layer.buffers())}
    for parameter in one.layer.get_base_layer().parameters():
        memo[id(parameter)] = _frozen_parameter(parameter.clone())
    layer: Any = copy.deepcopy(one.layer, memo)
    try:
        layer.merge()
    except Exception as reason:  # of many kinds, depending on the tuner
        log.info("layer_merge_failed", layer=one.name, reason=str(reason))
        return None
    return relative_error(layer(*one.given), one.made)


def _reference_error(one: Seen) -> float:
    memo: dict[int, Any] = {}
    for parameter in one.layer.parameters():
        memo[id(parameter)] = _frozen_parameter(_on_cpu(parameter))
    for buffer in one.layer.buffers():
        memo[id(buffer)] = _on_cpu(buffer)
    layer = copy.deepcopy(one.layer, memo)
    given = [_on_cpu(each) if isinstance(each, Tensor) else each for each in one.given]
    with _own_arithmetic():
        return relative_error(one.made.cpu(), layer(*given))


def _frozen_parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _on_cpu(tensor: Tensor) -> Tensor:
    found = tensor.detach().to("cpu")
    return found.float() if found.is_floating_point() else found


@contextmanager
def _own_arithmetic() -> Iterator[None]:
    """Compute the reference without the extension that it is meant to check."""
    from peft.tuners.boft import layer

    library: Any = layer
    used = library._FBD_CUDA
    boft.use_torch()
    try:
        yield
    finally:
        library._FBD_CUDA = used
