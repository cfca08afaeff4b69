"""A wall clock that can jump: every Python process with this folder on its PYTHONPATH adds to it what a file says.

The machine's own clock stays as it is, because other programs use it, and so does the monotonic clock, which never
jumps. Only Python's functions change; C++ reads the true clock.
"""

import os
import time

_FILE = os.environ.get("STAGEWRIGHT_SOAK_CLOCK", "")  # holds the seconds to add
_time, _localtime, _gmtime, _strftime = time.time, time.localtime, time.gmtime, time.strftime


def _jumped() -> float:
    try:
        with open(_FILE) as file:  # noqa: PTH123 (every process of the run would import pathlib first)
            return _time() + float(file.read())
    except (OSError, ValueError):
        return _time()


if _FILE:
    time.time = _jumped
    time.time_ns = lambda: int(_jumped() * 1e9)
    time.localtime = lambda seconds=None: _localtime(_jumped() if seconds is None else seconds)
    time.gmtime = lambda seconds=None: _gmtime(_jumped() if seconds is None else seconds)
    time.strftime = lambda form, moment=None: _strftime(form, time.localtime() if moment is None else moment)
