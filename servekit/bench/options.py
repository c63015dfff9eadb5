"""The options of the command line, checked before the server is contacted."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from servekit.bench import lengths, slo
from servekit.bench.client.client_protocol import Api, Asking, ClientLoad, Target
from servekit.bench.lengths import Lengths
from servekit.bench.prompts import read_dataset
from servekit.errors import ConfigError
from servekit.units import parse_duration

#: Default duration, without a number of requests.
DEFAULT_S = 30.0
#: Load that one client process can generate; `client_saturation` reports when it could not.
_USERS_EACH = 256
_RATE_EACH = 2000.0
_KEYS = ("SERVEKIT_API_KEY", "OPENAI_API_KEY")


class Load(msgspec.Struct, frozen=True):
    """A load level: exactly one of the two is set."""

    users: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.users} at once" if self.users is not None else f"{self.rate:g} arrivals/s"


class Options(msgspec.Struct, frozen=True):
    """The options of one command. `asking` lacks the values that only the server knows."""

    target: Target
    asking: Asking
    loads: tuple[Load, ...]
    requests: int | None
    duration_s: float | None
    warmup: int
    seed: int
    timeout_s: float
    processes: int | None
    slo: dict[str, float]

    def processes_of(self, load: Load) -> int:
        """Return the number of client processes, limited by cores, users and requests."""
        most = min(load.users or self.requests or 1_000_000, self.requests or 1_000_000)
        if self.processes is not None:
            return min(self.processes, most)
        need = (load.users or 0) / _USERS_EACH if load.users else (load.rate or 0.0) / _RATE_EACH
        return max(1, min(math.ceil(need), len(os.sched_getaffinity(0)), most))

    def orders(self, load: Load, asking: Asking) -> Iterator[ClientLoad]:
        """Yield the orders of the client processes, with users and requests divided among them."""
        clients = self.processes_of(load)
        for index in range(clients):
            yield ClientLoad(
                target=self.target,
                asking=asking,
                index=index,
                clients=clients,
                seed=self.seed,
                users=None if load.users is None else share_of(load.users, clients, index),
                rate=None if load.rate is None else load.rate / clients,
                requests=None if self.requests is None else share_of(self.requests, clients, index),
                duration_s=self.duration_s,
                warmup=share_of(self.warmup, clients, index),
                timeout_s=self.timeout_s,
            )


def share_of(whole: int, parts: int, index: int) -> int:
    """Return the part with this index, where parts differ by at most one."""
    return whole // parts + (index < whole % parts)


# ---------------------------------------------------------------- parsing


def parse_target(
    url: str, key: str | None, *, ca: Path | None, insecure: bool, environ: Mapping[str, str]
) -> Target:
    """Parse `http://HOST:PORT`, with an optional base such as /v1. Raises ConfigError."""
    written = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(written)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{url!r} is not the URL of a server: write http://HOST:PORT, or https://…"
        )
    if not (written.isascii() and written.isprintable()) or " " in written:
        raise ConfigError(f"{url!r} is not a URL: it has characters that no URL can have")
    if parts.username or parts.password:
        raise ConfigError("the URL has a password in it; a key comes from the environment")
    if ca is not None and not ca.is_file():
        raise ConfigError(f"--ca {ca}: there is no such file")
    base = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    is_tls = parts.scheme == "https"
    return Target(
        parts.hostname,
        port or (443 if is_tls else 80),
        base if base.endswith("/v1") else f"{base}/v1",
        tls=is_tls,
        ca=None if ca is None else str(ca),
        insecure=insecure,
        key=read_key(key, environ),
    )


def read_key(name: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the API key in the variable `name`, or in the first of the known ones that is set.

    Raises ConfigError. It repeats no name of a missing variable, which may be a key.
    """
    if name is None:
        name = next((known for known in _KEYS if environ.get(known)), None)
        if name is None:
            return None
    if not environ.get(name):
        raise ConfigError(
            "--api-key is the name of an environment variable, and there is none of that name: "
            "a key on a command line can be read by everybody on this machine"
        )
    if not (environ[name].isascii() and environ[name].isprintable()):
        raise ConfigError(f"the key in {name} has characters that no key can have")
    return environ[name]


def parse_loads(concurrency: str | None, rate: str | None) -> tuple[Load, ...]:
    """Parse load levels, separated by commas. Raises ConfigError."""
    if concurrency is not None and rate is not None:
        raise ConfigError(
            "use --concurrency (simultaneous users) or --rate (arrivals per second), not both"
        )
    if rate is not None:
        return tuple(Load(rate=_parse_positive("--rate", part)) for part in rate.split(","))
    return tuple(
        Load(users=_parse_count("--concurrency", part)) for part in (concurrency or "8").split(",")
    )


def _parse_positive(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e6:
        raise ConfigError(f"{option} {text.strip()!r}: write a number above 0, as in 10 or 0.5")
    return value


def _parse_count(option: str, text: str) -> int:
    if not text.strip().isdecimal() or not 0 < int(text) <= 100_000:
        raise ConfigError(f"{option} {text.strip()!r}: write whole numbers from 1, as in 1,8,64")
    return int(text)


def parse_run_time(text: str | None) -> float | None:
    """Parse `30`, `30s`, `5m` or `1h`. Raises ConfigError."""
    if text is None:
        return None
    seconds = 0.0
    with contextlib.suppress(ValueError):
        seconds = parse_duration(text)
    if not 0 < seconds <= 7 * 86400:
        raise ConfigError(f"--duration {text!r}: write a time above 0, as in 30s, 5m or 1h")
    return seconds


def make_asking(
    *,
    api: str,
    model: str,
    stream: bool,
    prompt_tokens: str | None,
    output_tokens: str,
    turns: str,
    shared_prefix_tokens: int,
    prefixes: int,
    ignore_eos: bool,
    extra: str | None,
    dataset: Path | None,
) -> Asking:
    """Check and combine the options about requests. Raises ConfigError."""
    kind = _parse_api(api)
    found = Asking(
        api=kind,
        model=model,
        stream=stream and kind != "embeddings",
        prompt_tokens=lengths.parse_lengths(prompt_tokens or "256", "--prompt-tokens"),
        output_tokens=lengths.parse_lengths(output_tokens, "--output-tokens"),
        turns=lengths.parse_lengths(turns, "--turns"),
        shared_prefix_tokens=shared_prefix_tokens,
        prefixes=prefixes,
        ignore_eos=ignore_eos,
        extra=_parse_extra(extra),
        dataset=None if dataset is None else str(dataset.resolve()),
    )
    _check_turns(found)
    if dataset is not None:
        if prompt_tokens is not None or shared_prefix_tokens:
            raise ConfigError(
                "--dataset has the prompts: --prompt-tokens and --shared-prefix-tokens are for "
                "those that are made up"
            )
        read_dataset(dataset, kind)
    return found


def _parse_api(text: str) -> Api:
    try:
        api: Api = msgspec.convert(text, Api)
        return api
    except msgspec.ValidationError:
        raise ConfigError(f"--api {text!r}: write chat, completions or embeddings") from None


def _check_turns(asking: Asking) -> None:
    if asking.turns == Lengths("fixed", 1):
        return
    if asking.api == "embeddings":
        raise ConfigError("--turns: embeddings have no conversations")
    if asking.dataset is not None:
        raise ConfigError("--turns: each line of --dataset is one request; leave one of them out")


def _parse_extra(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--extra is not a JSON object, as in '{{\"temperature\": 0.7}}': {error}"
        ) from None


def parse_limits(text: str | None) -> dict[str, float]:
    return {} if text is None else slo.parse_slo(text)
