"""The systemd unit, under systemd's own checks and under a systemd that runs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.cli.service.command import write_unit
from servekit.errors import ConfigError
from tests.integration.booted import ROOT, UNIT, Machine, why_not
from tests.integration.instance import echo
from tests.polling import poll

#: What `systemd-analyze security` may say at most, of 10; the unit says why not less.
MOST_EXPOSED = 2.0

needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def analyze(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *args], capture_output=True, text=True, timeout=60, check=False
    )


@needs_analyze
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/servekit/bin/servekit", "/bin/true"))
    done = analyze("verify", "--man=no", str(unit))
    assert (done.returncode, done.stderr) == (0, "")


@needs_analyze
def test_a_unit_starts_a_program_in_any_folder(tmp_path: Path) -> None:
    program = tmp_path / "my $programs 100%n" / "servekit"
    program.parent.mkdir()
    program.symlink_to("/bin/true")
    unit = tmp_path / UNIT.name
    unit.write_text(write_unit(tmp_path / "a.yaml", program, user=True))
    done = analyze("verify", "--man=no", str(unit))
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(ConfigError, match="with quotes or backslashes"):
        write_unit(tmp_path / "a.yaml", tmp_path / 'my "programs"' / "servekit", user=True)


@needs_analyze
def test_it_is_no_more_exposed_than_is_said() -> None:
    done = analyze("security", "--offline=true", str(UNIT))
    [found] = re.findall(r"exposure level for servekit.service: ([\d.]+)", done.stdout)
    assert float(found) <= MOST_EXPOSED
    page = ROOT / "servekit" / "docs" / "pages" / "operations" / "deployment.md"
    assert f"exposure {found} of 10" in page.read_text()


# ---------------------------------------------------------------- under systemd itself


def settings(*, replicas: int = 1, port: int = 8000) -> str:
    models = [echo("a", replicas=replicas)]
    return json.dumps({"models": models, "server": {"ui": False, "port": port}})


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if why := why_not():
        pytest.skip(f"no systemd can be booted here: {why}")
    with Machine.booted(
        tmp_path_factory.mktemp("booted"), settings(), "[Service]\nWatchdogSec=8s\n"
    ) as machine:
        yield machine


def until(machine: Machine, what: str, name: str, wanted: str, within_s: float = 60) -> None:
    try:
        poll(what, lambda: machine.show(name) == wanted, within_s)
    except AssertionError as error:
        raise AssertionError(f"{error}: {machine.show(name)!r}\n{machine.journal()}") from None


def test_it_serves_heals_reloads_and_stops_as_a_unit(machine: Machine) -> None:
    machine.systemctl("start", "servekit")  # returns when READY=1 has come
    until(machine, "the model is ready", "StatusText", "1 of 1 models ready")
    worker = pid_of(machine, "a/0")
    machine.run("kill", "-9", str(worker))
    poll("the worker is replaced", lambda: pid_of(machine, "a/0") not in (0, worker), 60)
    until(machine, "the model is ready again", "StatusText", "1 of 1 models ready")
    assert machine.show("NRestarts") == "0", "the unit is not restarted for a worker's sake"

    machine.config.write_text(settings(replicas=2))
    machine.systemctl("reload", "servekit")
    poll("the second worker is up", lambda: pid_of(machine, "a/1"), 60)
    machine.config.write_text('{"models": 5}')
    refused = machine.run("systemctl", "reload", "servekit")
    assert refused.returncode != 0
    poll("it is told why", lambda: "servekit.yaml:1:12: models" in machine.journal(), 60)
    assert machine.show("ActiveState") == "active"
    machine.config.write_text(settings())

    private = machine.run("stat", "-c", "%a %U", "/var/lib/servekit/run").stdout.split()
    assert private == ["700", "servekit"]
    machine.systemctl("stop", "servekit")
    assert machine.show("Result") == "success"
    assert machine.run("pgrep", "-f", "servekit.worker").stdout == ""


@pytest.mark.lane("waits")
def test_a_supervisor_that_hangs_is_replaced_by_its_watchdog(machine: Machine) -> None:
    machine.systemctl("start", "servekit")
    until(machine, "the model is ready", "StatusText", "1 of 1 models ready")
    first = machine.show("MainPID")
    assert machine.show("WatchdogTimestampMonotonic") != "0"
    machine.run("kill", "-STOP", first)
    until(machine, "systemd has started it anew", "NRestarts", "1", within_s=120)
    assert "Watchdog timeout" in machine.journal()
    until(machine, "the model is ready", "StatusText", "1 of 1 models ready")
    assert machine.show("MainPID") != first
    machine.systemctl("stop", "servekit")


def test_a_file_that_cannot_be_used_is_not_tried_again(machine: Machine) -> None:
    machine.config.write_text('{"models": []}')
    assert machine.run("systemctl", "start", "servekit").returncode != 0
    machine.config.write_text(settings())
    assert machine.show("ExecMainStatus") == "2"
    assert machine.show("ActiveState") == "failed"


#: A user's manager without a login: it has its own part of the cgroups, and no bus.
MANAGER = """
mkdir -p -m 700 /run/user-manager /var/home/.config/systemd/user
cp /opt/given/user.service /var/home/.config/systemd/user/servekit.service
chown -R 65534:65534 /run/user-manager /var/home
systemd-run --unit=manager --uid=65534 --gid=65534 -p Delegate=yes -p Type=notify \\
    -E XDG_RUNTIME_DIR=/run/user-manager -E HOME=/var/home /lib/systemd/systemd --user
"""
AS_USER = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env"),
    *("XDG_RUNTIME_DIR=/run/user-manager", "HOME=/var/home"),
)


@pytest.mark.lane("surroundings")
def test_the_unit_of_a_user_serves_reloads_and_stops(machine: Machine) -> None:
    program = Path("/opt/servekit/bin/servekit")
    config = Path("/etc/servekit/a \"b\" \\c $d ${e} %n 'f'.yaml")
    machine.run("ln", "-s", "/etc/servekit/servekit.yaml", str(config))
    (machine.folder / "user.service").write_text(write_unit(config, program, user=True))
    machine.config.write_text(settings())
    begun = machine.run("bash", "-ec", MANAGER)
    assert begun.returncode == 0, begun.stderr

    def run_as_user(*command: str) -> str:
        done = machine.run(*AS_USER, *command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    run_as_user("systemctl", "--user", "start", "servekit")
    show = ("systemctl", "--user", "show", "servekit", "--value", "-p", "StatusText")
    poll("the model is ready", lambda: run_as_user(*show) == "1 of 1 models ready\n")
    machine.config.write_text(settings(replicas=2))
    run_as_user("systemctl", "--user", "reload", "servekit")
    poll("the second worker is up", lambda: "a/1" in run_as_user(str(program), "ps"))
    state = machine.run("stat", "-c", "%a %u", "/var/home/.local/state/servekit/default").stdout
    assert state == "700 65534\n"
    run_as_user("systemctl", "--user", "stop", "servekit")
    assert machine.run("pgrep", "-f", "servekit.worker").stdout == ""
    machine.systemctl("stop", "manager")


def pid_of(machine: Machine, worker: str) -> int:
    """0 while there is none."""
    told = machine.run(
        *("/opt/servekit/bin/servekit", "ps", "--json", "--run-dir", "/var/lib/servekit/run")
    )
    if told.returncode:
        return 0
    models = json.loads(told.stdout)["models"]
    found = [one for model in models for one in model["replicas"] if one["name"] == worker]
    return found[0]["pid"] if found and found[0]["state"] == "ready" else 0
