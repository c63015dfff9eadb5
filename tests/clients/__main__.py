"""Clients that people have, as they install them, against a running instance.

    python -m tests.clients
    python -m tests.clients --only outlines lm_eval
    python -m tests.clients --url http://127.0.0.1:8000 --legacy-url http://127.0.0.1:8888

Without --url it starts an instance of its own: SmolLM2 of configs/demo.yaml on the CPU, and models
of random weights that see and hear, for clients that send pictures and recordings. Every
client is installed in an environment of its own, which is kept for the next time, so that none of
them decides what another, or servekit, has. Prints a Markdown table; exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from servekit.config.load import load_config
from servekit.engines.model_files.source import resolve_folder
from tests.clients.environments import Environment, NotInstalled
from tests.clients.table import Check, table
from tests.integration.instance import Instance
from tests.media_models import EARS, EYES, WHISPER, write_files, write_models

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, slots=True)
class Client:
    """What is installed, and the script that uses it. The first requirement names the version."""

    name: str
    requirements: tuple[str, ...]
    script: str
    npm: bool = False
    torch: bool = False  # it needs torch, and gets the version that is here: it is large


CLIENTS = (
    Client("openai", ("openai",), "use_openai.py"),
    Client("anthropic", ("anthropic",), "use_anthropic.py"),
    Client("ollama", ("ollama",), "use_ollama.py"),
    Client("litellm", ("litellm", "mcp"), "use_litellm.py"),
    Client("langchain", ("langchain-openai",), "use_langchain.py"),
    Client("llama_index", ("llama-index-llms-openai-like",), "use_llama_index.py"),
    Client("pydantic_ai", ("pydantic-ai-slim[openai]",), "use_pydantic_ai.py"),
    Client("instructor", ("instructor",), "use_instructor.py"),
    Client("outlines", ("outlines[openai]",), "use_outlines.py"),
    Client("openai_node", ("openai",), "use_openai_node.mjs", npm=True),
    Client(
        "ai_sdk",
        ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod"),
        "use_ai_sdk.mjs",
        npm=True,
    ),
    Client("huixiangdou", ("requests",), "use_huixiangdou.py"),
    Client("lm_eval", ("lm-eval[api]", "transformers"), "use_lm_eval.py"),
    Client("guidellm", ("guidellm",), "use_guidellm.py", torch=True),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [client.name for client in CLIENTS]
    parser.add_argument("--url", help="an instance that runs; by default one is started")
    parser.add_argument("--legacy-url", default="", help="its port with `legacy: huixiangdou`")
    parser.add_argument("--model", default="", help="by default the first that it lists")
    parser.add_argument("--eyes", default="", help="one that sees; without it none is asked to")
    parser.add_argument("--ears", default="", help="one that hears recordings in chats")
    parser.add_argument("--whisper", default="", help="one that transcribes")
    parser.add_argument("--key", default="none", help="the API key, if it wants one")
    parser.add_argument("--tokenizer", help="a folder with the model's tokenizer")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CLIENT")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each client")
    parser.add_argument("--cache", type=Path, default=_cache(), help="where clients are installed")
    return parser.parse_args(argv)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "servekit-clients"


@contextlib.contextmanager
def instance(wish: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The URL of what is to be tried, and of its legacy port; "" where it has none."""
    if wish.url:
        yield wish.url.rstrip("/"), wish.legacy_url.rstrip("/")
        return
    port = _free_port()
    model = {"name": "smollm2", "path": load_config(DEMO).models[0].path, "device": "cpu"}
    server = {"legacy": "huixiangdou", "legacy_port": port, "store_responses": {}}
    wish.eyes, wish.ears, wish.whisper = EYES, EARS, WHISPER
    with (
        tempfile.TemporaryDirectory() as models,
        tempfile.TemporaryDirectory() as folder,
        Instance.up(Path(folder), [model, *write_models(Path(models))], server=server) as one,
    ):
        one.until_settled(within_s=600)
        yield one.url, f"http://127.0.0.1:{port}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def use(client: Client, wish: argparse.Namespace, told: dict[str, str]) -> list[Check]:
    """Install a client and run its script; what it could do, one line each."""
    environment = Environment(wish.cache, client.name, client.requirements, npm=client.npm)
    try:
        version = environment.install(torch=client.torch)
    except NotInstalled as error:
        return [Check(client.name, "?", "install", False, str(error))]
    result = environment.run(SCRIPTS / client.script, told, wish.timeout)
    return [Check(client.name, version, *one) for one in result]


def describe(wish: argparse.Namespace, url: str, legacy: str) -> dict[str, str]:
    """Return the environment variables that tell a script about the instance."""
    key = {"Authorization": f"Bearer {wish.key}"}
    listed = httpx.get(f"{url}/v1/models", headers=key, timeout=60).raise_for_status().json()
    wish.cache.mkdir(parents=True, exist_ok=True)
    picture, speech = write_files(wish.cache)
    return {
        "SERVED_URL": url,
        "SERVED_LEGACY_URL": legacy,
        "SERVED_MODEL": wish.model or listed["data"][0]["id"],
        "SERVED_KEY": wish.key,
        "SERVED_TOKENIZER": wish.tokenizer or _tokenizer(),
        "SERVED_EYES": wish.eyes,
        "SERVED_EARS": wish.ears,
        "SERVED_WHISPER": wish.whisper,
        "SERVED_PICTURE": str(picture),
        "SERVED_SPEECH": str(speech),
    }


def main(argv: Sequence[str]) -> int:
    wish = parse(argv)
    checks: list[Check] = []
    with instance(wish) as (url, legacy):
        told = describe(wish, url, legacy)
        for client in (one for one in CLIENTS if one.name in wish.only):
            found = use(client, wish, told)
            for check in found:
                print(check, file=sys.stderr, flush=True)
            checks += found
    print(table(checks))
    return int(not all(check.passed for check in checks))


def _tokenizer() -> str:
    """The demo model's folder; it is converted already where it is served from here."""
    return str(resolve_folder(load_config(DEMO).models[0].path, None, lambda progress: None))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
