"""Aggregation of the clients' reports of one load into a Run of the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from servekit.bench.client.client_protocol import Ended, Record, Report
from servekit.bench.client_saturation import Clients, saturation_limits
from servekit.bench.output.result import ClientFigures, Failure, Goodput, Run, Second, Spread
from servekit.bench.percentiles import Histogram, Sample
from servekit.bench.slo import is_good
from servekit.bench.timing import Timing, tokens_in_time, tokens_of


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine on which the clients run."""

    busy: float  # utilisation of its cores, by all processes
    cores: int
    has_server: bool  # the server runs on this machine, too


class Tally:
    """The aggregated figures of one load, fed by one reader. `began` is the agreed start time."""

    def __init__(self, began: float, slo: Mapping[str, float], end: float | None = None) -> None:
        self.began = began
        self.ttft, self.tpot, self.e2e = Sample(), Sample(), Sample()
        self.gaps = Histogram()
        self.good = self.completed = self.unfinished = 0
        self.sent = self.in_flight = self.chunks = 0
        self.failures: Counter[str] = Counter()
        self._slo = slo
        self._end = end  # end of the measurement, if known in advance
        self._messages: dict[str, str] = {}
        self._prompts, self._outputs = Sample(), Sample()
        self._in_time = self._good_in_time = 0
        self._tokens_in_time = self._prompts_in_time = 0.0
        self._counted: Counter[str] = Counter()
        self._seconds: dict[int, list[float]] = {}
        self._ends: list[Ended] = []
        self._live: dict[int, tuple[int, int, int]] = {}

    @property
    def failed(self) -> int:
        return self.failures.total()

    # ---- during the load

    def report(self, client: int, report: Report) -> None:
        self._live[client] = report.sent, report.in_flight, report.chunks
        self.sent, self.in_flight, self.chunks = map(sum, zip(*self._live.values(), strict=True))
        self.gaps.merge(report.gaps)
        for record in report.records:
            self._record(record)

    def add_end(self, ended: Ended) -> None:
        self._ends.append(ended)

    def _record(self, record: Record) -> None:
        in_time = self._end is None or record.ended <= self._end
        if record.outcome == "unfinished":
            self.unfinished += 1
            self._count_tokens(record)
            return
        second = self._seconds.setdefault(int(record.ended - self.began), [0, 0, 0.0])
        if record.outcome != "ok":
            second[1] += 1
            self._fail(record)
            self._count_tokens(record)
            return
        self.completed += 1
        self._in_time += in_time
        second[0] += 1
        second[2] += tokens_of(record)
        is_kept = self._measure(record)
        self.good += is_kept
        self._good_in_time += is_kept and in_time
        self._count_tokens(record)

    def _measure(self, record: Record) -> bool:
        """Add the record's times and counts; return whether it met the SLO."""
        timing = Timing.from_record(record)
        self.e2e.add(timing.e2e_s)
        if timing.ttft_s is not None:
            self.ttft.add(timing.ttft_s)
        if timing.tpot_s is not None:
            self.tpot.add(timing.tpot_s)
        if record.prompt_tokens is not None:
            self._prompts.add(record.prompt_tokens)
        if tokens := tokens_of(record):
            self._outputs.add(tokens)
        by = "chunks" if record.output_tokens is None else "usage"
        if tokens:
            self._counted[by] += 1
        return is_good(record, timing, self._slo)

    def _count_tokens(self, record: Record) -> None:
        end = record.ended if self._end is None else self._end
        self._tokens_in_time += tokens_in_time(record, end)
        if record.outcome == "ok" and record.ended <= end:
            self._prompts_in_time += record.prompt_tokens or 0

    def _fail(self, record: Record) -> None:
        kind = f"http {record.status}" if record.outcome == "http" else record.outcome
        self.failures[kind] += 1
        self._messages.setdefault(kind, record.message)

    # ---- after the load

    def make_result(
        self,
        *,
        concurrency: int | None,
        rate: float | None,
        interrupted: bool,
        machine: Machine,
    ) -> Run:
        duration_s = self.duration_s()
        ended = self.completed + self.failed
        return Run(
            concurrency=concurrency,
            rate=rate,
            duration_s=duration_s,
            interrupted=interrupted,
            completed=self.completed,
            failed=self.failed,
            unfinished=self.unfinished,
            requests_per_s=self._in_time / duration_s,
            output_tokens_per_s=self._tokens_in_time / duration_s,
            prompt_tokens_per_s=self._prompts_in_time / duration_s if self._prompts else None,
            tokens_by=self.tokens_by(),
            prompt_tokens=compute_spread(self._prompts),
            output_tokens=compute_spread(self._outputs),
            ttft_s=compute_spread(self.ttft),
            itl_s=compute_spread(self.gaps),
            tpot_s=compute_spread(self.tpot),
            e2e_s=compute_spread(self.e2e),
            goodput=self._goodput(duration_s, ended),
            errors=[
                Failure(kind, count, self._messages[kind])
                for kind, count in self.failures.most_common()
            ],
            client=self._client(machine, is_open=rate is not None),
            timeline=self._timeline(),
        )

    def duration_s(self) -> float:
        ends = [ended.ended_at for ended in self._ends]
        last = max(ends) if ends else self._end or self.began
        return max(1e-9, last - self.began)

    def tokens_by(self) -> str:
        if len(self._counted) > 1:
            return "both"
        return next(iter(self._counted), "none")

    def _goodput(self, duration_s: float, ended: int) -> Goodput | None:
        if not self._slo:
            return None
        share = self.good / ended if ended else 0.0
        return Goodput(dict(self._slo), self._good_in_time / duration_s, share)

    def _client(self, machine: Machine, *, is_open: bool) -> ClientFigures:
        lags, late = Histogram(), Histogram()
        for ended in self._ends:
            lags.merge(ended.lags)
            late.merge(ended.late)
        lag_p99_s = lags.percentile_value(99) if lags else 0.0
        late_p99_s = (late.percentile_value(99) if late else 0.0) if is_open else None
        cpu_cores = tuple(ended.cpu_cores for ended in self._ends)
        found = Clients(
            cpu_cores,
            lag_p99_s,
            late_p99_s,
            machine.busy,
            machine.cores,
            machine.has_server,
        )
        resent = sum(ended.resent for ended in self._ends)
        told = list(saturation_limits(found))
        return ClientFigures(len(cpu_cores), list(cpu_cores), lag_p99_s, late_p99_s, resent, told)

    def _timeline(self) -> list[Second]:
        last = max(self._seconds, default=-1)
        found = (self._seconds.get(second, [0, 0, 0.0]) for second in range(last + 1))
        return [Second(int(done), int(failed), tokens) for done, failed, tokens in found]


def compute_spread(values: Sample | Histogram) -> Spread | None:
    if not len(values):
        return None
    at = [values.percentile_value(percent) for percent in range(101)]
    return Spread(len(values), values.mean, at[50], at[90], at[99], values.greatest, at)
