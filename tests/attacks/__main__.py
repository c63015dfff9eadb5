"""Do what has broken servekit before to a running instance, and see that every promise holds.

    python -m tests.attacks
    python -m tests.attacks raise-in-step core-killed
    python -m tests.attacks --list

Prints a Markdown table, a row an attack; exit code 1 if a request failed that was due an answer, a
text was not what it should be, or anything was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from servekit.errors import ServekitError
from tests.attacks import deaths, harm, instance, neighbours
from tests.attacks.scene import GLIBC, Account, Attack, Scene, segments
from tests.integration.instance import Instance
from tests.plugin_site import install_plugin, path_with

ATTACKS: list[Attack] = [*deaths.ATTACKS, *harm.ATTACKS, *neighbours.ATTACKS, *instance.ATTACKS]
PLUGIN = Path(__file__).parent / "fragile"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ATTACK", help="by default all of them")
    parser.add_argument("--list", action="store_true", help="name them, and end")
    parser.add_argument("--log", action="store_true", help="print the instance's log, too")
    wish = parser.parse_args(argv)
    unknown = set(wish.names) - {attack.name for attack in ATTACKS}
    if unknown:
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    return wish


def carry_out(attack: Attack, *, show_log: bool = False) -> Account:
    """Start the attack's instance, attack it, end it, and return the account."""
    account = Account()
    before = segments()
    with tempfile.TemporaryDirectory(prefix="servekit-attack-") as name:
        folder = Path(name)
        env = GLIBC | path_with(install_plugin(PLUGIN, folder / "site")) | dict(attack.env)
        models = attack.models(folder)
        try:
            with Instance.up(
                folder, models, server=attack.server, sections=attack.sections, env=env
            ) as one:
                try:
                    asyncio.run(attack_instance(one, folder, attack, account))
                finally:
                    if show_log:
                        print(one.log)
        except AssertionError as error:
            account.leftovers += "outlived" in str(error)
            account.complain(str(error).splitlines()[0])
        left = segments() - before
        account.leftovers += len(left)
    return account


async def attack_instance(one: Instance, folder: Path, attack: Attack, account: Account) -> None:
    """Carry out an attack on an instance whose models are up."""
    status = await asyncio.to_thread(one.until_settled, 600.0)
    scene = Scene(one, status.url, folder, account)
    await scene.client.get("/v1/models")
    account.before_mib = await scene.memory_mib()
    try:
        await attack.run(scene)
    except Exception as error:  # the other attacks are to be seen all the same
        account.complain(f"broke off: {type(error).__name__}: {error}")
    with contextlib.suppress(ServekitError):  # the attack may have ended it
        account.after_mib = await scene.memory_mib()
        account.deaths = await scene.restarts()


def row(attack: Attack, account: Account, took_s: float) -> str:
    memory = f"{account.before_mib:.0f} → {account.after_mib:.0f} MiB"
    figures = (account.requests, account.failed, account.wrong, account.deaths)
    cells = [attack.name, attack.summary, *map(str, figures), memory, str(account.leftovers)]
    return f"| {' | '.join(cells)} | {took_s:.0f} s |"


def main(argv: Sequence[str]) -> int:
    wish = parse(argv)
    chosen = [attack for attack in ATTACKS if not wish.names or attack.name in wish.names]
    if wish.list:
        print("\n".join(f"{attack.name:24} {attack.summary}" for attack in chosen))
        return 0
    print(
        "| attack | done | requests | failed | wrong | workers that died | memory | left | time |"
    )
    print("|---|---|--:|--:|--:|--:|---|--:|--:|", flush=True)
    broken: list[str] = []
    for attack in chosen:
        began_s = time.monotonic()
        account = carry_out(attack, show_log=wish.log)
        print(row(attack, account, time.monotonic() - began_s), flush=True)
        broken += [f"{attack.name}: {sentence}" for sentence in account.complaints]
        if not account.clean and not account.complaints:
            broken.append(f"{attack.name}: see the table")
    if broken:
        print("\nbroken:\n" + "\n".join(broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
