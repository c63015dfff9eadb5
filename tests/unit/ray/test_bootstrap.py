"""What an instance does before it joins a Ray cluster, and what it leaves for the next one."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from servekit.config.schema import ModelConfig
from servekit.config.sections.cluster import RayConfig
from servekit.errors import StartError
from servekit.protocol.control.ray_messages import NodeRequirements
from servekit.protocol.transport.certificate_authority import Authority
from servekit.ray import bootstrap
from tests.unit.ray.process.test_actor import free_port


def test_an_instance_finds_its_actors_again_by_a_name_of_its_own(tmp_path: Path) -> None:
    named = bootstrap.ray_namespace(RayConfig(namespace="mine"), tmp_path)
    assert named == "mine"
    first, second = tmp_path / "a", tmp_path / "b"
    found = bootstrap.ray_namespace(RayConfig(), first)
    assert found.startswith("servekit-") and len(found) == len("servekit-") + 12
    assert bootstrap.ray_namespace(RayConfig(), first) == found
    assert bootstrap.ray_namespace(RayConfig(), second) != found


# ---------------------------------------------------------------- the head


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a head that accepts connections."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_head_that_answers_is_reached(port: int) -> None:
    await bootstrap.reach_head(f"127.0.0.1:{port}")


async def test_an_address_of_the_next_protocol_stands_in_brackets() -> None:
    try:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with server:
        await bootstrap.reach_head(f"[::1]:{server.sockets[0].getsockname()[1]}")


async def test_without_an_address_ray_looks_for_the_head_itself() -> None:
    await bootstrap.reach_head("auto")


async def refusal(address: str) -> str:
    with pytest.raises(StartError) as caught:
        await bootstrap.reach_head(address)
    return str(caught.value)


async def test_a_head_that_does_not_answer_is_told_with_what_to_do() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert await refusal(address) == (
        f"no Ray cluster answers at {address} (Connection refused): start one there with `ray start"
        " --head`, or change `ray.address`"
    )


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:70000", "port must be 0-65535"),
        ("head..cluster:6379", "label empty"),
        (f"{'head' * 20}:6379", "label too long"),
    ],
)
async def test_an_address_that_no_head_can_have_is_told_in_the_same_way(
    address: str, reason: str
) -> None:
    said = await refusal(address)
    assert said.startswith(f"no Ray cluster answers at {address} (")
    assert reason in said


async def test_a_head_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_REACH_S", 0.05)
    with socket.socket() as sock:  # its queue is full: the kernel drops what comes
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        address = sock.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(address)
            assert "(no answer in 0.05 s)" in await refusal(f"127.0.0.1:{address[1]}")
        finally:
            for one in waiting:
                one.close()


# ---------------------------------------------------------------- the authority


def test_the_next_supervisor_gets_the_authority_of_one_that_was_killed(tmp_path: Path) -> None:
    first = bootstrap.load_authority(tmp_path)
    assert bootstrap.load_authority(tmp_path).certificate != first.certificate, "none is kept yet"
    bootstrap.store_authority(tmp_path, first)
    assert bootstrap.load_authority(tmp_path) == first
    second = Authority.new("servekit")
    bootstrap.store_authority(tmp_path, second)
    assert bootstrap.load_authority(tmp_path) == second
    bootstrap.forget_authority(tmp_path)
    bootstrap.forget_authority(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nobody_else_may_read_the_authority(tmp_path: Path) -> None:
    bootstrap.store_authority(tmp_path, Authority.new("servekit"))
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("data", [b"", b"{", b"\xff" * 40])
def test_an_authority_that_was_half_written_is_replaced(tmp_path: Path, data: bytes) -> None:
    bootstrap.store_authority(tmp_path, Authority.new("servekit"))
    [file] = tmp_path.iterdir()
    file.write_bytes(data)
    found = bootstrap.load_authority(tmp_path)
    assert found.cluster.startswith("servekit-")


# ---------------------------------------------------------------- what models need


def model(name: str, path: str, engine: str = "transformers") -> ModelConfig:
    return ModelConfig(name=name, path=path, engine=engine)


def test_a_node_needs_the_files_that_nobody_fetches() -> None:
    models = [
        model("local", "/models/a"),
        model("hub", "org/name"),
        model("package", "pypi:a==1.0/b.gguf", "llamacpp"),
        model("echo", "/not/read", "echo"),
    ]
    assert bootstrap.model_wants(models) == (
        NodeRequirements("local", "transformers", "/models/a"),
        NodeRequirements("hub", "transformers", ""),
        NodeRequirements("package", "llamacpp", ""),
        NodeRequirements("echo", "echo", ""),
    )


@pytest.mark.parametrize(
    ("host", "found"), [("10.0.0.5", "0.0.0.0"), ("fd00::5", "[::]"), ("", "0.0.0.0")]
)
def test_a_worker_listens_at_all_addresses_of_its_hosts_protocol(host: str, found: str) -> None:
    assert bootstrap.any_address(host) == found


def test_the_authority_stays_where_another_cannot_be_written(tmp_path: Path) -> None:
    first = Authority.new("a")
    bootstrap.store_authority(tmp_path, first)
    with no_room(), pytest.raises(OSError):
        bootstrap.store_authority(tmp_path, Authority.new("b"))
    assert bootstrap.load_authority(tmp_path) == first


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Have no file of this process grow beyond a few bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
