"""Entry point that replaces itself by a command that the kernel kills when its parent dies.

`python -m servekit.gateway.tool_servers.exec_with_parent PARENT_PID COMMAND...`, for commands that
are not ours. PR_SET_PDEATHSIG stays across exec, unless the program is setuid. Source: prctl(2).
"""

from __future__ import annotations

import os
import resource
import sys

from servekit.system.parent_death import die_with


def exec_command(parent_pid: int, command: list[str]) -> None:
    """Run the command in place of this process. Its parent's limit of memory is not for it."""
    die_with(parent_pid)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    exec_command(int(sys.argv[1]), sys.argv[2:])
