"""The course of `servekit bench`: probe the server, then run one load after another."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from servekit import __version__
from servekit.bench import probe
from servekit.bench.aggregator import Machine, Tally
from servekit.bench.client.client_protocol import Asking
from servekit.bench.client.clients import Clients
from servekit.bench.options import Load, Options
from servekit.bench.output.result import VERSION, Result, Run

if TYPE_CHECKING:
    from servekit.bench.output.live_display import Display

_LOOK_EVERY_S = 0.1
_HERE = {"127.0.0.1", "::1", "localhost"}


def run_benchmark(
    options: Options,
    program: Sequence[str],
    environ: Mapping[str, str],
    watcher: Callable[[Options], contextlib.AbstractContextManager[Display]],
) -> Result:
    """Measure all loads; after a Ctrl-C return the results so far. Raises ServekitError."""
    known = probe.list_models(options.target)
    model = probe.choose_model(options.asking.model or None, known, options.target.url)
    options = msgspec.structs.replace(
        options, asking=msgspec.structs.replace(options.asking, model=model)
    )
    told = probe.calibrate_tokens(options.target, options.asking, options.seed, options.timeout_s)
    began_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with watcher(options) as shown:
        runs = asyncio.run(_Course(options, told, program, environ, shown).loads())
    return Result(
        VERSION, __version__, began_at, options.target.url, describe_request(options), runs
    )


def describe_request(options: Options) -> dict[str, object]:
    """Return the request parameters in the command line's terms, without the key."""
    about = options.asking
    return {
        "model": about.model,
        "api": about.api,
        "stream": about.stream,
        "prompt_tokens": None if about.dataset else str(about.prompt_tokens),
        "output_tokens": str(about.output_tokens),
        "turns": str(about.turns),
        "shared_prefix_tokens": about.shared_prefix_tokens,
        "prefixes": about.prefixes,
        "ignore_eos": about.ignore_eos,
        "extra": about.extra,
        "dataset": about.dataset,
        "requests": options.requests,
        "duration_s": options.duration_s,
        "warmup": options.warmup,
        "seed": options.seed,
        "timeout_s": options.timeout_s,
    }


class _Course:
    def __init__(
        self,
        options: Options,
        asking: Asking,
        program: Sequence[str],
        environ: Mapping[str, str],
        shown: Display,
    ) -> None:
        self._options = options
        self._asking = asking
        self._program = program
        self._environ = environ
        self._shown = shown
        self._stop = asyncio.Event()

    async def loads(self) -> list[Run]:
        runs = []
        with _handle_interrupts(self._stop):
            for load in self._options.loads:
                if self._stop.is_set():
                    break
                if (run := await self._load(load)) is not None:
                    runs.append(run)
        return runs

    async def _load(self, load: Load) -> Run | None:
        """Run one load; return None if it was interrupted before its start."""
        self._shown.show_warmup(load)
        async with Clients(self._program, self._environ) as clients:
            stopping = asyncio.create_task(self._stopped(clients))
            try:
                await clients.start(list(self._options.orders(load, self._asking)))
                if self._stop.is_set():
                    return None
                return await self._measure(load, clients)
            finally:
                stopping.cancel()

    async def _stopped(self, clients: Clients) -> None:
        await self._stop.wait()
        clients.stop()

    async def _measure(self, load: Load, clients: Clients) -> Run:
        busy = machine_cpu_s()
        at = clients.start_load()
        limit_s = self._options.duration_s
        tally = Tally(at, self._options.slo, None if limit_s is None else at + limit_s)
        self._shown.began(load, tally)
        looking = asyncio.create_task(self._watch_clients())
        try:
            await clients.read_into(tally)
        finally:
            looking.cancel()
        found = tally.make_result(
            concurrency=load.users,
            rate=load.rate,
            interrupted=self._stop.is_set(),
            machine=Machine(
                busy_share(busy, machine_cpu_s()),
                len(os.sched_getaffinity(0)),
                self._options.target.host in _HERE,
            ),
        )
        self._shown.finish(found)
        return found

    async def _watch_clients(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self._shown.looked()


def busy_share(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Return the utilisation of this machine's cores between two values of `machine_cpu_s`."""
    return (after[0] - before[0]) / (after[1] - before[1]) if after[1] > before[1] else 0.0


def machine_cpu_s() -> tuple[float, float]:
    """Return the CPU time of all cores since boot, busy and total; zeros if unknown (proc(5))."""
    try:
        fields = [
            float(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        ]
    except (OSError, ValueError):
        return 0.0, 0.0
    return sum(fields) - fields[3] - fields[4], sum(fields)


@contextlib.contextmanager
def _handle_interrupts(stop: asyncio.Event) -> Iterator[None]:
    """Handle signals: a first Ctrl-C ends the measurement with its results, a second one aborts."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()

    def interrupt() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
