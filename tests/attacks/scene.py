"""An instance under attack, and the account that is kept of an attack."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from servekit.protocol.messages import GetStatus, Status
from servekit.supervisor.admin.control_socket import query_supervisor
from tests.attacks.client import DEADLINE_S, Answer, Client
from tests.integration.instance import Instance

MIB = 2**20
#: The options that make a table of memory comparable: glibc gives back all that is freed at once.
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
#: For an answer of the supervisor: engines that load may take all of the machine.
STATUS_S = 60.0


@dataclass
class Account:
    """The figures of one attack."""

    requests: int = 0
    failed: int = 0  # requests that had a right to an answer and got none
    wrong: int = 0  # answers that are not the text that was due, or not in the API's form
    deaths: int = 0  # workers that ended
    before_mib: float = 0.0  # resident memory of gateways and supervisor
    after_mib: float = 0.0
    leftovers: int = 0  # processes, sockets and segments of shared memory
    complaints: list[str] = field(default_factory=list)

    def complain(self, sentence: str) -> None:
        """Note a breach of a promise; one of each kind is enough to read."""
        if sentence not in self.complaints:
            self.complaints.append(sentence)

    def expect(self, holds: bool, sentence: str) -> None:
        """Count what does not hold as wrong."""
        if not holds:
            self.wrong += 1
            self.complain(sentence)

    def check(self, answer: Answer, due: str | None) -> None:
        """Compare an answer that was due with the text that was due; None: any text."""
        self.requests += 1
        if answer.failed:
            self.failed += 1
            self.complain(f"failed: {answer.status} {answer.error}")
        elif due is not None and answer.text != due:
            self.wrong += 1
            self.complain(f"wrong text: {answer.text[:60]!r} for {due[:60]!r}")
        self.check_form(answer)

    def check_form(self, answer: Answer) -> None:
        """Compare an answer, or a refusal, with the form of its API alone."""
        if answer.faults:
            self.wrong += 1
            self.complain(f"form: {'; '.join(answer.faults)}")

    @property
    def clean(self) -> bool:
        """Whether every promise held."""
        return not (self.failed or self.wrong or self.leftovers or self.complaints)


class Scene:
    """One instance, a client of it, and the account of the attack on it."""

    def __init__(
        self,
        instance: Instance,
        url: str,
        folder: Path,
        account: Account,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.longest_status_s = 0.0
        self.instance = instance
        self.folder = folder
        self.account = account
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self.client = Client(parts.hostname, parts.port, deadline_s=deadline_s)

    # ---- processes

    async def status(self) -> Status:
        """Ask the supervisor for its status."""
        began_s = time.monotonic()
        control = self.instance.run_dir / "control.sock"
        answer = await query_supervisor(control, GetStatus(), STATUS_S)
        assert isinstance(answer, Status)
        self.longest_status_s = max(self.longest_status_s, time.monotonic() - began_s)
        return answer

    async def gateways(self) -> list[int]:
        """PIDs of the gateways."""
        return [gateway.pid for gateway in (await self.status()).gateways if gateway.pid]

    async def workers(self, model: str = "m") -> list[int]:
        """PIDs of a model's workers that serve."""
        models = (await self.status()).models
        replicas = [r for one in models if one.name == model for r in one.replicas]
        return [replica.pid for replica in replicas if replica.state == "ready" and replica.pid]

    async def restarts(self) -> int:
        """Workers that have been replaced so far."""
        models = (await self.status()).models
        return sum(replica.restarts for model in models for replica in model.replicas)

    async def memory_mib(self) -> float:
        """Resident memory of the gateways and the supervisor."""
        return sum(map(resident_mib, [self.instance.pid, *await self.gateways()]))

    async def until(
        self, sentence: str, holds: Callable[[], Awaitable[object]], within_s: float = 30.0
    ) -> None:
        """Wait until something holds; complain with `sentence` when it does not in time."""
        deadline_s = time.monotonic() + within_s
        while not await holds():
            if time.monotonic() > deadline_s:
                self.account.complain(f"not within {within_s:g} s: {sentence}")
                return
            await asyncio.sleep(0.05)

    async def until_serving(self, workers: int, model: str = "m", within_s: float = 60.0) -> None:
        """Wait until so many workers of a model serve."""

        async def serve() -> bool:
            return len(await self.workers(model)) == workers

        await self.until(f"{workers} workers of {model} serve", serve, within_s)

    async def until_replaced(self, deaths: int, workers: int = 2, model: str = "m") -> None:
        """Wait until so many workers have died, and as many as there should be serve again."""

        async def replaced() -> bool:
            return await self.restarts() >= deaths and len(await self.workers(model)) == workers

        await self.until(f"{deaths} workers are replaced", replaced, 60.0)

    async def expect_deaths(self, most: int, cause: str) -> None:
        """Count it as wrong if more workers than that have died."""
        deaths = await self.restarts()
        self.account.expect(deaths <= most, f"{deaths} workers died of {cause}")

    # ---- traffic

    @contextlib.asynccontextmanager
    async def bystanders(
        self,
        count: int,
        ask: Callable[[int], Awaitable[tuple[Answer, str | None]]],
    ) -> AsyncIterator[None]:
        """Run `count` clients who ask one request after another for as long as the block lasts.

        `ask` takes a number, different for each request, and returns the answer and the text that
        was due. Requests under way when the block ends are waited for.
        """
        over = asyncio.Event()

        async def keep_asking(client: int) -> None:
            turn = 0
            while not over.is_set():
                self.account.check(*await ask(client + count * turn))
                turn += 1

        async with asyncio.TaskGroup() as group:
            for client in range(count):
                group.create_task(keep_asking(client))
            try:
                yield
            finally:
                over.set()

    async def ask_fragile(
        self,
        number: int,
        tokens: int = 40,
        model: str = "m",
        voice: str = "upper",
        client: Client | None = None,
    ) -> tuple[Answer, str]:
        """Ask the fragile engine, every other time for a stream."""
        prompt = f"question {number}"
        stream = number % 2 == 0
        answer = await (client or self.client).complete(model, prompt, tokens, stream=stream)
        return answer, due_text(voice, prompt, tokens)

    async def ask_all(self, asked: Sequence[Awaitable[tuple[Answer, str | None]]]) -> list[Answer]:
        """Ask all at once and check every answer."""
        found = await asyncio.gather(*asked)
        for answer, due in found:
            self.account.check(answer, due)
        return [answer for answer, _ in found]


def due_text(voice: str, prompt: str, tokens: int) -> str:
    """Return the answer of the fragile engine to a prompt."""
    first = ord("A") if voice == "upper" else ord("a")
    text = ""
    for position in range(tokens):
        hashed = hashlib.blake2b(prompt.encode() + position.to_bytes(4, "big"), digest_size=1)
        text += chr(first + hashed.digest()[0] % 16)
    return text


def resident_mib(pid: int) -> float:
    """Resident memory of a process; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def children(pid: int) -> list[int]:
    """PIDs of a process's own children."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def segments() -> set[str]:
    """Names of the shared memory of servekit's processes."""
    return {path.name for path in Path("/dev/shm").glob("servekit-*")}


def fragile(folder: Path, name: str = "m", voice: str = "upper", **settings: Any) -> dict[str, Any]:
    """Return a model of the fragile engine for a configuration; `options` are its own."""
    path = folder / f"voice-{voice}"
    path.mkdir(exist_ok=True)
    (path / "voice").write_text(voice)
    return {"name": name, "engine": "fragile", "path": str(path), **settings}


@dataclass(frozen=True)
class Attack:
    """An attack by its name, with the instance that it needs."""

    name: str
    summary: str
    models: Callable[[Path], list[dict[str, Any]]]
    run: Callable[[Scene], Awaitable[None]]
    server: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    needs_model: bool = False  # SmolLM2, from the package index or the cache
