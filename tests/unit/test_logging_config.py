"""The log as a terminal, a file and a program see it, each in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import pytest

#: Logs as the supervisor does: an event, a child's text, a library's record, an error.
PROGRAM = """
import logging, sys, structlog
from servekit import logging_config
if len(sys.argv) > 1 and sys.argv[1].isdigit():
    import fcntl, struct, termios
    fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 30, int(sys.argv[1]), 0, 0))
logging_config.configure("supervisor", json="json" in sys.argv)
log = structlog.get_logger("servekit.supervisor")
log.info("worker_ready", child="m/0", device="cpu", after_s=1.5, more=[1, 2])
log.info("output", child="m/0", text="as  it is {x}")
logging.getLogger("uvicorn.error").warning("odd %s", "request")
log.error("gpu_memory_stray", child="m/0", pid=7, reason="holds \\x1b[2J520 MiB on GPU 0")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("display_failed", child="m/0")
"""


def run(*args: str) -> str:
    command = [sys.executable, "-c", PROGRAM, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


def shown(columns: int, **environment: str) -> str:
    """Return what a terminal of that width is sent."""
    ours, theirs = pty.openpty()
    environ = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(columns)],
        stderr=theirs,
        env={**environ, **environment},
    ) as process:
        os.close(theirs)
        parts = []
        with os.fdopen(ours, "rb", buffering=0) as file:
            try:
                while part := file.read(2**16):
                    parts.append(part)
            except OSError:  # EIO: the other end is closed
                pass
    assert process.returncode == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_a_terminal_shows_time_component_and_sentence() -> None:
    text = shown(80, NO_COLOR="1")
    assert "\x1b" not in text
    lines = re.sub(r"^\d\d:\d\d:\d\d ", "", text, flags=re.MULTILINE).splitlines()
    assert lines[:5] == [
        "m/0          The worker serves on cpu after 1.5 s more=1, 2",
        "m/0          as  it is {x}",
        "supervisor   warning: odd request",
        "m/0          error: The worker uses memory of a GPU that is not its",
        f"{'':22}own: it holds 520 MiB on GPU 0 pid=7",
    ]
    assert lines[5] == "m/0          error: A line cannot be shown"
    assert lines[6].startswith("Traceback") and lines[-1] == "ZeroDivisionError: division by zero"


def test_colours_tell_the_level_and_long_lines_are_wrapped() -> None:
    text = shown(60)
    assert "\x1b[31merror: " in text and "\x1b[33mwarning: " in text
    plain = re.sub(r"\x1b\[\d*m", "", text)
    assert all(len(line) <= 60 for line in plain.split("Traceback")[0].splitlines())
    assert "\n" + " " * 22 not in shown(20), "a narrow terminal wraps by itself"


def test_elsewhere_a_line_has_the_event_and_its_fields() -> None:
    lines = run().splitlines()
    assert re.fullmatch(r"\S+Z \[info +\] worker_ready \[servekit.supervisor\] .*", lines[0])
    assert {"child=m/0", "after_s=1.5"} <= set(lines[0].split())
    assert "] as  it is {x} [servekit.supervisor] child=m/0" in lines[1]
    assert "] odd request [uvicorn.error]" in lines[2]
    assert "reason='holds 520 MiB on GPU 0'" in lines[3], "a client's or a worker's words, perhaps"


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, {"event": "worker_ready", "component": "m/0", "level": "info", "more": [1, 2]}),
        (1, {"event": "output", "component": "m/0", "text": "as  it is {x}"}),
        (2, {"event": "library_logged", "component": "supervisor", "text": "odd request"}),
        (3, {"event": "gpu_memory_stray", "level": "error", "child": "m/0"}),
    ],
)
def test_json_has_stable_names(number: int, expected: dict[str, object]) -> None:
    line = json.loads(run("json").splitlines()[number])
    assert line.items() >= expected.items()
    assert line["process"] == "supervisor"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["timestamp"])


def test_a_traceback_is_a_field() -> None:
    line = json.loads(run("json").splitlines()[-1])
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_a_traceback_elsewhere_is_pythons_own_without_values() -> None:
    written = run()
    assert "Traceback (most recent call last):" in written
    assert "ZeroDivisionError: division by zero" in written
    assert "locals" not in written


#: Logs more than a pipe takes, before its log is read and after it.
TALKER = """
import sys, structlog
from servekit import logging_config
logging_config.configure("supervisor", json=True)
log = structlog.get_logger("servekit.supervisor")
for number in range(5000):
    log.info("line", number=number, text="x" * 100)
print("went on", flush=True)
sys.stdin.readline()
log.info("last", text="x" * 10000)
"""


def test_a_log_that_nobody_reads_for_a_while_holds_up_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TALKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "went on\n"
        lines = [process.stderr.readline() for _ in range(1100)]  # so that others have room
        process.stdin.write("\n")
        process.stdin.flush()
        lines += process.stderr.readlines()
    *kept, lost, last = lines
    assert [json.loads(line)["number"] for line in kept] == list(range(len(kept)))
    assert lost == f"[{5000 - len(kept)} lines lost: nobody read the log]\n"
    assert json.loads(last)["text"] == "x" * 10000
