"""How each kind of fault is made to happen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.soak.processes import Soak, ranks_by_number
from tests.soak.schedule import LOST_SECONDS, Fault, Kind

_HOLD_SECONDS = 3.0  # how long a rank is stopped, a cable is cut or a disk is full
_LONG_CUT_SECONDS = 2.0 * LOST_SECONDS
_STARTS_KILLED = 2
_PORT = 29600
_STRANGER = """
import socket, sys
held = []
for number in range(int(sys.argv[3])):
    try:
        held.append(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5))
        if number % 2:
            held[-1].sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    except OSError:
        pass  # refused: that is what it is for
print("connected", flush=True)
sys.stdin.read()
"""


def apply(soak: Soak, fault: Fault) -> None:
    """Make a fault happen; returns when its cause is over, and the operator has done what was left to do."""
    number = fault.number
    match fault.kind:
        case Kind.KILL_RANK:
            os.kill(soak.rank(number), signal.SIGKILL)
        case Kind.KILL_STARTING:
            _kill_starts(soak, number)
        case Kind.KILL_SUPERVISOR:
            _kill_supervisor(soak, number)
        case Kind.TERMINATE:
            soak.terminate(number)
            soak.is_resumed = True
            soak.start_all()
        case Kind.STOP:
            stopped = soak.rank(number)
            os.kill(stopped, signal.SIGSTOP)
            soak.hold(_HOLD_SECONDS)
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        case Kind.HANG:
            os.kill(soak.rank(number), signal.SIGSTOP)
        case Kind.CUT | Kind.LONG_CUT:
            soak.network.cut(number)
            soak.hold(_HOLD_SECONDS if fault.kind is Kind.CUT else _LONG_CUT_SECONDS)
            soak.network.heal(number)
        case Kind.FULL_DISK:
            with full(soak.runs):
                soak.hold(_HOLD_SECONDS)
        case Kind.KILL_WHILE_FULL:
            with full(soak.runs):
                killed = soak.rank(number)
                os.kill(killed, signal.SIGKILL)
                soak.wait(lambda: not Path(f"/proc/{killed}").exists(), "the killed rank to be noticed")
                soak.hold(_HOLD_SECONDS)
        case Kind.CLOCK:
            soak.clock.write_text(str(3600 * number))
        case Kind.STRANGERS:
            with strangers(soak, number):
                _wait_for_step(soak)
        case Kind.STRANGERS_AT_START:
            with strangers(soak, number):
                before = len(soak.progress.starts)
                os.kill(soak.rank(0), signal.SIGKILL)
                soak.wait(lambda: len(soak.progress.starts) > before, "a start")
                _wait_for_step(soak)


def _wait_for_step(soak: Soak) -> None:
    most = soak.progress.most
    soak.wait(lambda: soak.progress.most > most or soak.is_over(), "a new step")


def _kill_starts(soak: Soak, number: int) -> None:
    """Kill a rank, and then the same rank of the next starts as soon as its process exists."""
    seen = {soak.rank(number)}
    os.kill(*seen, signal.SIGKILL)
    for _ in range(_STARTS_KILLED):
        soak.wait(lambda: ranks_by_number(soak.runs).get(number, next(iter(seen))) not in seen, "a start")
        process = ranks_by_number(soak.runs).get(number)
        if process is not None:
            seen.add(process)
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _kill_supervisor(soak: Soak, machine: int) -> None:
    """Kill a machine's supervisor and start it again, as soon as its ranks have ended with it."""
    supervisor, ranks = soak.supervisors[machine], ranks_by_number(soak.runs)
    first = sum(soak.plan.ranks_by_machine[:machine])
    own = [ranks[rank] for rank in range(first, first + soak.plan.ranks_by_machine[machine]) if rank in ranks]
    supervisor.kill()
    supervisor.wait()
    soak.wait(lambda: not any(Path(f"/proc/{rank}").exists() for rank in own), "its ranks to end", may_exit=True)
    if machine == 0:
        soak.is_resumed = True
    soak.start(machine)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """While the context is open, nothing more fits on a disk."""
    ballast = disk / "ballast"
    try:
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield
    finally:
        ballast.unlink()


@contextmanager
def strangers(soak: Soak, connections: int) -> Iterator[None]:
    """While the context is open, another host holds connections to machine 0, and half of them sent nonsense."""
    command = [sys.executable, "-c", _STRANGER, soak.network.address(0), str(_PORT), str(connections)]
    process = subprocess.Popen(
        soak.network.inside(soak.plan.machines, *command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdout.readline()
        yield
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
