"""The output of `servekit why`: a diagnosis in a sentence, then the deaths, the newest last."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from servekit.cli.display.startup_timings import how_far
from servekit.cli.display.tables import format_size, state_text
from servekit.protocol.adapters import AdapterStatus
from servekit.protocol.messages import ReplicaHistory, Why
from servekit.protocol.residency import ResidencyStatus, tier_text
from servekit.protocol.types import ExitRecord, ScaleStatus
from servekit.sanitize import strip_controls
from servekit.units import count_noun

#: Output lines shown of each death; the newest death shows all.
_FEW_LINES = 3


def why_tables(why: Why, *, had_others: bool = False) -> Sequence[RenderableType]:
    """Return the whole answer, for a person; `had_others`: processes of before have died."""
    shown: list[RenderableType] = [Text(explain_state(why, had_others=had_others), style="bold")]
    if why.breaker != "closed":
        shown.append(Text(f"breaker: {strip_controls(why.breaker)}", style="red"))
    if why.scale is not None:
        shown.append(Text(_scale(why.scale)))
    for adapter in why.adapters:
        shown += ["", *_adapter(adapter)]
    for replica in why.replicas:
        shown += ["", _head(replica)]
        for exit_ in replica.exits[:-1]:
            shown += _death(exit_, lines=_FEW_LINES)
        if replica.exits:
            shown += _death(replica.exits[-1], lines=len(replica.exits[-1].tail))
            shown += [
                Text(f"    {strip_controls(line)}", "dim") for line in replica.exits[-1].stacks
            ]
    return shown


def explain_state(why: Why, *, had_others: bool = False) -> str:
    """Return a sentence with the problem and the next step."""
    last = max((exit_ for r in why.replicas for exit_ in r.exits), key=lambda e: e.at, default=None)
    serving = sum(replica.state == "ready" for replica in why.replicas)
    total = len(why.replicas)
    alone = [replica.state for replica in why.replicas if replica.name == why.model]
    stands = alone[0] if alone else f"{serving} of {total} ready"
    head = f"{why.model}: {_standing(why.residence) or stands}"
    if last is None and had_others:
        return f"{head}; its deaths since the start are below."
    if last is None:
        return f"{head}; no process of it has died since the start."
    return f"{head}; last death {_ago(last)}: {_sentence(last)} {_advice(why, last)}"


def _standing(residence: ResidencyStatus | None) -> str:
    """Describe a model that comes and goes: "stopped at 21:03:11: evicted for b, …"."""
    if residence is None or residence.tier == "resident":
        return ""
    tier, reason = residence.tier, strip_controls(residence.reason)
    if reason.startswith(tier):
        return reason
    return f"{tier_text(tier)}; {reason}" if reason else tier_text(tier)


def _scale(scale: ScaleStatus) -> str:
    """Describe the range of replicas, the last scaling with its reason, and what prevents more."""
    said = [f"replicas: {scale.desired}, between {scale.min} and {scale.max} by its load"]
    if scale.at:
        said.append(
            f"{time.strftime('%H:%M:%S', time.localtime(scale.at))} {strip_controls(scale.reason)}"
        )
    if scale.waits:
        said.append(f"not scaled up: {strip_controls(scale.waits)}")
    return "; ".join(said)


def _sentence(exit_: ExitRecord) -> str:
    return strip_controls(exit_.what).rstrip(".") + "."


def _advice(why: Why, last: ExitRecord) -> str:
    if last.out_of_memory == "host":
        return "The machine ran out of memory: give it fewer or smaller models, or fewer replicas."
    if last.out_of_memory == "gpu":
        return "The GPU ran out of memory: lower max_context, slots or kv_cache_bytes."
    if last.what.startswith(("stalled", "silent")):
        return "The stacks below say where it hung" + (
            "." if last.stacks else ", if it could still write them."
        )
    failed = [replica for replica in why.replicas if replica.state == "failed"]
    if (
        failed
        and why.breaker == "closed"
        and all(replica.next_attempt_s is None for replica in failed)
    ):
        return "It is not tried again: correct the reported problem, then run `servekit reload`."
    if failed or why.breaker != "closed":
        again = "`servekit reload` tries again at once."
        return f"Look at its last lines below; {again}" if last.tail else again
    if last.signal is not None and why.replicas and not last.tail:
        return "It left no message: a user, or the kernel, killed it."
    if any(replica.state == "backoff" for replica in why.replicas):
        return "It is tried again by itself; `servekit reload` does so at once."
    return "It was started again by itself." if not failed else ""


def _adapter(adapter: AdapterStatus) -> Iterator[Text]:
    """Yield an adapter's mode with the reason and measurements, or its error."""
    line = Text(f"adapter {strip_controls(adapter.name)}", style="bold").append(" ")
    yield line.append_text(state_text(adapter.state)).append(
        f", from {strip_controls(adapter.path)}", ""
    )
    if adapter.reason:
        yield Text(f"    {strip_controls(adapter.reason)}", style="red")
    if (info := adapter.info) is None:
        return
    rank = f", rank {info.rank}" if info.rank else ""
    yield Text(f"    {info.kind}{rank}, {info.mode}: {strip_controls(info.why)}")
    facts = [f"{info.parameters} parameters"] if info.parameters else []
    facts += [format_size(info.bytes)] if info.bytes else []
    facts += [f"{name} {value:.3g}" for name, value in info.figures.items()]
    if facts:
        yield Text(f"    {', '.join(facts)}", style="dim")


def _head(replica: ReplicaHistory) -> Text:
    line = (
        Text(strip_controls(replica.name), style="bold")
        .append(" ")
        .append_text(state_text(replica.state))
    )
    line.append(f", {count_noun(replica.restarts, 'restart')}", "")
    if replica.next_attempt_s is not None:
        line.append(f", next attempt in {replica.next_attempt_s:.1f} s")
    if replica.reason:
        line.append(f": {strip_controls(replica.reason)}")
    if replica.alert:
        line.append(f"\n  {strip_controls(replica.alert)}", style="red")
    return line


def _death(exit_: ExitRecord, *, lines: int) -> Iterator[Text]:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(exit_.at))
    yield Text(f"  {at}  pid {exit_.pid}  {strip_controls(exit_.what)}")
    facts = [
        f"lived {exit_.lived_s:.1f} s, {exit_.phase}",
        f"{count_noun(exit_.served, 'request')} served, {exit_.running} running",
    ]
    if exit_.rss_bytes:
        facts.append(f"{format_size(exit_.rss_bytes)} of memory")
    if exit_.gpu_bytes:
        facts.append(f"{format_size(exit_.gpu_bytes)} on the GPU")
    if exit_.out_of_memory:
        facts.append(f"probably out of memory ({exit_.out_of_memory})")
    yield Text(f"    {'; '.join(facts)}", style="dim")
    if exit_.start is not None:
        yield Text(f"    {strip_controls(how_far(exit_.start))}", style="dim")
    for line in exit_.tail[len(exit_.tail) - min(lines, len(exit_.tail)) :]:
        yield from (Text(f"    | {shown}", style="dim") for shown in _format_output_line(line))


def _format_output_line(line: str) -> Iterator[str]:
    """Format a line of servekit's own logging as `servekit logs` does; yield others unchanged."""
    from servekit.cli.display.startup_display import read_line
    from servekit.log_events import sentence

    _, event, fields = read_line(line)
    yield from strip_controls(sentence(event, fields)).split("\n")


def _ago(exit_: ExitRecord) -> str:
    return f"{max(0.0, time.time() - exit_.at):.0f} s ago"
