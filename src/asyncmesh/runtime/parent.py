"""A process that ends with the one that started it.

Owns what keeps orphans from going on for ever when a launcher is killed. Invariant: there is no
moment at which the parent could be gone without being noticed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


def die_with(parent: int, by: signal.Signals) -> None:
    """Be sent that signal when the process `parent` ends, or end at once if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, by)
    if os.getppid() != parent:
        os._exit(1)
