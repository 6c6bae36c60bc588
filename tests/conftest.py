"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell starts background jobs with SIGINT ignored, and programs started from there would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
