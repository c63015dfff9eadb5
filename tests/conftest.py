"""What all tests need of the process they run in."""

from __future__ import annotations

import signal

# Under nohup, or in the background of some shells, hangups are ignored, and so they would be by
# every process that the tests start: servekit takes them for reloads, but not where they are off.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
