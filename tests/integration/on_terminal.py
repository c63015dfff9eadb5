"""`python -m tests.integration.on_terminal …` is `servekit …` with the terminal on stdin as its
controlling one, so that a Ctrl-C typed there is a SIGINT here.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "servekit", *sys.argv[1:]])
