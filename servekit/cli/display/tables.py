"""Tables of a plan and of a running instance, for the command line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from servekit.cli.display.responsive_table import Fitted
from servekit.config.engines import installed, vllm_checks
from servekit.config.sections.cluster import RayConfig
from servekit.protocol.adapters import AdapterStatus
from servekit.protocol.messages import (
    GatewayStatus,
    ModelStatus,
    Preset,
    Progress,
    ReplicaStatus,
    Status,
)
from servekit.protocol.residency import tier_text
from servekit.ray import node_requirements
from servekit.sanitize import strip_controls
from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.presets import list_presets
from servekit.supervisor.scheduling.memory_requests import host_claim_bytes
from servekit.system import cgroup
from servekit.units import format_bytes, format_duration

_COLOURS = {
    "ready": "green",
    "starting": "yellow",
    "loading": "yellow",
    "stalled": "red",
    "draining": "yellow",
    "backoff": "red",
    "failed": "red",
    "stopped": "dim",
    # of models
    "resident": "green",
    "asleep": "cyan",
    "coming": "yellow",
    "leaving": "yellow",
    # of adapters
    "serving": "green",
    "unloading": "yellow",
}
#: Width of a table in a file or a pipe, where nothing should be cut off.
_WIDE = 200


def print_tables(*renderables: RenderableType) -> None:
    """Print to stdout, in colour on a terminal."""
    # No markup: a path may contain [brackets], a model's name :colons:.
    width = None if sys.stdout.isatty() else _WIDE
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    for renderable in renderables:
        console.print(renderable)


def plan_tables(plan: Plan) -> Sequence[RenderableType]:
    """Return tables of the planned workers, and of the available GPUs."""
    used = {gpu for place in plan.places for gpu in place.gpus}
    gpus = [f"{gpu}{'' if gpu in used else ', idle'}" for gpu in plan.gpus]
    shown: list[RenderableType] = [Fitted(_placement_table(plan), "THREADS", "DTYPE", "DEVICE")]
    presets = {one.name: list_presets(one) for one in plan.config.models if one.presets}
    shown += [_preset_table(presets)] if presets else []
    if any(model.adapters for model in plan.config.models):
        shown.append(Fitted(_named_adapters(plan)))
    if plan.estimates:
        shown.append(Fitted(_memory_table(plan), "CONTEXT", "KV / 1K TOKENS"))
        shown += fit_lines(plan)
    shown += [Text(f"{name}: engine {choice}") for name, choice in plan.choices.items()]
    if plan.config.launcher == "local":
        shown += _vllm_lines(plan)
    if plan.config.launcher == "ray":
        address = (plan.config.ray or RayConfig()).address
        shown.append(Text(f"GPUs: those of the Ray cluster at {address}, which `up` asks for them"))
    else:
        shown.append(Text("; ".join(gpus) or "no NVIDIA GPU found"))
    return [*shown, *(Text(told, style="yellow") for told in installed.refused_plugins())]


def _vllm_lines(plan: Plan) -> Iterator[Text]:
    """Yield what is to be said of each model's vLLM, where it is not the tested core of it."""
    for model in plan.config.models:
        if model.engine == "vllm" and (sentence := vllm_checks.describe_api(model)):
            yield Text(f"{model.name}: {sentence}", style="yellow")


def _named_adapters(plan: Plan) -> Table:
    table = new_table("ADAPTER", "MODEL", "PATH")
    for model in plan.config.models:
        for adapter in model.adapters:
            table.add_row(Text(adapter.name), Text(model.name), Text(adapter.path))
    return table


def _placement_table(plan: Plan) -> Table:
    models = {model.name: model for model in plan.config.models}
    by_need = any(model.load != "on_start" for model in plan.config.models)
    load = ("LOAD",) if by_need else ()
    table = new_table("WORKER", *load, "ENGINE", "DEVICE", "THREADS", "DTYPE", "PATH")
    for place in plan.places:
        model = models[place.model]
        device = (
            node_requirements.in_words(model) if plan.config.launcher == "ray" else place.device
        )
        threads = "" if place.threads is None or "GPU" in device else str(place.threads)
        told = (model.load,) if by_need else ()
        dtype = str(model.options.get("quantization") or model.dtype)
        shown = (model.engine, device, threads, dtype, model.path)
        table.add_row(place.name, *told, *shown)
    return table


def _memory_table(plan: Plan) -> Table:
    """Return each model's estimated and claimed memory, per GPU or of the host."""
    each = " PER GPU" if any(place.gpus or place.elsewhere for place in plan.places) else ""
    table = new_table(
        "MODEL", "WEIGHTS", "KV / 1K TOKENS", "CONTEXT", f"LEAST{each}", f"CLAIM{each}"
    )
    table.add_column("NOTE")
    models = {model.name: model for model in plan.config.models}
    for name, found in plan.estimates.items():
        place = next(place for place in plan.places if place.model == name)
        here = host_claim_bytes(models[name], cgroup.total_memory_bytes())
        claim = min(place.claims, default=here)
        table.add_row(
            Text(name),
            format_size(found.weights_bytes),
            format_size(found.kv_1k_bytes),
            str(found.context or "-"),
            format_size(found.on_each_least_bytes),
            format_size(claim),
            Text(found.describe_claim(claim)),
        )
    return table


def fit_lines(plan: Plan, names: Collection[str] = ()) -> Iterator[Text]:
    """Yield how many requests of which length each model has room for; `names`: only of these."""
    for name, found in plan.estimates.items():
        if names and name not in names:
            continue
        model = next(model for model in plan.config.models if model.name == name)
        place = next(place for place in plan.places if place.model == name)
        total = cgroup.total_memory_bytes()
        claim = min(place.claims, default=host_claim_bytes(model, total) or total)
        where = f"{format_bytes(claim)} of {place.device}" if place.gpus else format_bytes(claim)
        if told := found.describe_requests(claim):
            yield Text(f"{name}: {where} have room for the weights and these requests: {told}")
        elif claim and found.on_each_weights_bytes > claim and not found.partly:
            said = f"{name}: its weights alone take more than the {where} that there are"
            yield Text(f"{said}; choose a smaller or quantised model", style="yellow")


def status_tables(status: Status) -> Sequence[RenderableType]:
    """Return tables of a running instance: workers, gateways, and the supervisor itself."""
    head = Text(
        f"servekit {status.version} · {status.url} · {status.config} · pid {status.pid} · "
        f"{format_size(status.rss_bytes)} · up {format_duration(time.time() - status.started_at)}"
        + (f" · profile {status.profile}" if status.profile else "")
        + (" · draining" if status.draining else "")
    )
    presets = {model.name: model.presets for model in status.models if model.presets}
    adapters = {model.name: model.adapters for model in status.models if model.adapters}
    shown: list[RenderableType] = [head]
    if any(model.residence is not None for model in status.models):
        shown.append(Fitted(_residency_table(status), "UNUSED", "LOAD"))
    if any(model.scale is not None for model in status.models):
        shown.append(Fitted(_scaling_table(status), "LAST SCALED"))
    shown.append(Fitted(_worker_table(status), "PID", "DEVICE", "RSS"))
    shown += [_preset_table(presets)] if presets else []
    shown += [adapter_table(adapters)] if adapters else []
    return [*shown, Fitted(_gateway_table(status), "PID", "RSS")]


def _residency_table(status: Status) -> Table:
    """Return a table of the models that come and go."""
    table = new_table("MODEL", "STATE", "LOAD", "WAIT", "UNUSED", "LEAVES IN", "NOTE")
    for model in status.models:
        if (residence := model.residence) is None:
            continue
        leaves_s = residence.leaves_in_s
        table.add_row(
            Text(model.name),
            state_text(residence.tier),
            residence.load,
            str(residence.waiting),
            format_duration(residence.idle_s) if residence.tier in ("resident", "asleep") else "-",
            "-" if leaves_s is None else format_duration(leaves_s),
            Text(strip_controls(residence.reason)),
        )
    return table


def _scaling_table(status: Status) -> Table:
    """Return a table of the models that scale with their load."""
    table = new_table("MODEL", "REPLICAS", "QUEUE", "LAST SCALED", "NOTE")
    queued = {one.model: one.queued for one in status.traffic}
    for model in status.models:
        if (scale := model.scale) is not None:
            ago = f"{format_duration(time.time() - scale.at)} ago" if scale.at else "-"
            said = "; ".join(filter(None, (scale.reason, scale.waits)))
            waits = str(queued.get(model.name, 0))
            table.add_row(
                Text(model.name), replica_span(model), waits, ago, Text(strip_controls(said))
            )
    return table


def replica_span(model: ModelStatus) -> str:
    """Return the number of ready replicas, with the range of a model that scales: "2 (1–4)"."""
    scale = model.scale
    serving = sum(replica.state == "ready" for replica in model.replicas)
    return str(serving) if scale is None else f"{serving} ({scale.min}–{scale.max})"


def _preset_table(presets: Mapping[str, Sequence[Preset]]) -> RenderableType:
    """Return a table of the presets, by model, and what each sets."""
    table = new_table("PRESET", "MODEL", "SETS")
    for model, ours in presets.items():
        for one in ours:
            table.add_row(Text(one.name), Text(model), Text(strip_controls(_preset_note(one))))
    return Fitted(table)


def _preset_note(preset: Preset) -> str:
    """Return what a preset sets, without the text of its system message."""
    variables = dict(preset.template)
    if variables.get("thinking") == variables.get("enable_thinking"):  # two names of one switch
        variables.pop("enable_thinking", None)
    told = [f"{name} {value}" for name, value in preset.sampling.items()]
    told += ["system message"] if preset.system else []
    told += [f"{name} {json.dumps(value)}" for name, value in variables.items()]
    return ", ".join(told) or "only its name"


def adapter_table(adapters: Mapping[str, Sequence[AdapterStatus]]) -> RenderableType:
    """Return a table of the adapters: their modes, or their errors."""
    table = new_table("ADAPTER", "STATE", "MODEL", "KIND", "MODE", "SIZE", "SINCE", "NOTE")
    for model, statuses in adapters.items():
        for one in statuses:
            info = one.info
            table.add_row(
                Text(one.name),
                state_text(one.state),
                Text(model),
                info.kind if info else "-",
                info.mode if info else "-",
                format_size(info.bytes) if info else "-",
                format_duration(time.time() - one.since),
                Text(adapter_note(one)),
            )
    return Fitted(table, "SINCE", "SIZE", "KIND")


def adapter_note(adapter: AdapterStatus) -> str:
    """Return the reason for an adapter's failure, else for its mode."""
    if adapter.reason:
        return strip_controls(adapter.reason)
    return strip_controls(adapter.path if adapter.info is None else adapter.info.why).rstrip(".")


def _worker_table(status: Status) -> Table:
    table = new_table("WORKER", "STATE", "PID", "DEVICE", "RSS", "GPU", "RESTARTS", "RUN", "WAIT")
    table.add_column("NOTE")
    for model in status.models:
        for replica in (*model.replicas, *model.standbys):
            table.add_row(
                replica.name,
                state_text(replica.state),
                str(replica.pid or "-"),
                replica.device,
                format_size(replica.rss_bytes),
                gpu_use(replica),
                str(replica.restarts),
                str(replica.running),
                str(replica.waiting),
                Text(replica_note(model, replica)),
            )
    return table


def _gateway_table(status: Status) -> Table:
    table = new_table("GATEWAY", "STATE", "PID", "RSS", "RESTARTS", "IN FLIGHT", "REQUESTS")
    told = any(gateway.reason for gateway in status.gateways)
    if told:
        table.add_column("NOTE")
    for gateway in status.gateways:
        table.add_row(
            gateway.name,
            state_text(gateway.state),
            str(gateway.pid or "-"),
            format_size(gateway.rss_bytes),
            str(gateway.restarts),
            str(gateway.in_flight),
            str(gateway.requests),
            *([Text(gateway_note(gateway))] if told else []),
        )
    return table


def gateway_note(gateway: GatewayStatus) -> str:
    """Return why a gateway does not serve, or the reason of its last end."""
    said = strip_controls(gateway.reason)
    return f"last: {said}" if said and gateway.state == "ready" else said


def new_table(*columns: str) -> Table:
    """Return a table without lines, with these columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column in ("WORKER", "STATE", "PID"))
    return table


def state_text(name: str) -> Text:
    """Return a state or tier in its word for people, and its colour."""
    return Text(tier_text(name), style=_COLOURS.get(name, ""))


def replica_note(model: ModelStatus, replica: ReplicaStatus) -> str:
    """Return a note about a replica: its progress, why it is down, else its model."""
    return strip_controls(_model_note(model, replica))


def _model_note(model: ModelStatus, replica: ReplicaStatus) -> str:
    if replica.stray or replica.excess:
        return "; ".join(filter(None, (replica.stray, replica.excess)))
    if replica.trouble:
        return replica.trouble
    if replica.progress is not None:
        return progress_text(replica.progress)
    if replica.state in ("failed", "backoff"):
        return replica.reason
    if replica.reason:
        return f"last: {replica.reason}"
    if replica in model.standbys:
        return "forks the next worker" if replica.state == "ready" else ""
    return f"{model.info.architecture} {model.info.dtype}" if model.info else ""


def gpu_use(replica: ReplicaStatus) -> str:
    """Return the memory that a replica holds on GPUs, and its claim."""
    held = format_size(replica.gpu_bytes)
    return f"{held} of {format_size(replica.claim_bytes)}" if replica.claim_bytes else held


def progress_text(progress: Progress) -> str:
    """Format progress: "fetch 12 MiB of 90 MiB", "load 30 of 272 tensors", "warm-up"."""
    if not progress.total:
        return progress.phase
    if progress.unit == "bytes":
        return f"{progress.phase} {format_size(progress.done)} of {format_size(progress.total)}"
    return f"{progress.phase} {progress.done} of {progress.total} {progress.unit}".rstrip()


def format_size(size_bytes: int) -> str:
    """Format a number of bytes; "-" for 0."""
    return format_bytes(size_bytes) if size_bytes else "-"
