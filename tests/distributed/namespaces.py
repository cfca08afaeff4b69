"""Several machines on one: network namespaces on a bridge of veth pairs, with the bandwidth of a slow network.

    namespace 0 ── veth ──┐
    namespace 1 ── veth ──┴── bridge, in its own namespace

Tests are skipped where namespaces can't be made. Everything is removed at the end, also after an interrupt.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOKEN = "a token of tests, long enough"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Machines:
    """Namespaces that stand for machines, at 10.77.0.1, 10.77.0.2, ..."""

    prefix: str
    count: int
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def name(self, machine: int) -> str:
        return f"{self.prefix}-{machine}"

    def address(self, machine: int) -> str:
        return f"10.77.0.{machine + 1}"

    @property
    def nodes(self) -> str:
        return ",".join(map(self.address, range(self.count)))

    def inside(self, machine: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name(machine), *command]

    def start(self, machine: int, *arguments: str, token: str | None = TOKEN) -> subprocess.Popen[str]:
        """A command line of Stagewright on one of the machines."""
        environment = {key: value for key, value in os.environ.items() if key != "STAGEWRIGHT_TOKEN"}
        if token is not None:
            environment["STAGEWRIGHT_TOKEN"] = token
        return self.run(machine, [sys.executable, "-m", "stagewright", *arguments], environment)

    def run(
        self, machine: int, command: Sequence[str], environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.inside(machine, *command),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def cut(self, machine: int) -> None:
        """Drop everything to and from a machine, without an error on either side."""
        ip("-n", f"{self.prefix}-hub", "link", "set", f"p{machine}", "down")

    def heal(self, machine: int) -> None:
        ip("-n", f"{self.prefix}-hub", "link", "set", f"p{machine}", "up")

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@contextmanager
def machines(count: int = 2, rate: str = "1gbit", prefix: str | None = None) -> Iterator[Machines]:
    """Make machines whose connections carry `rate`; skip the test where that is not possible."""
    found = Machines(prefix or f"sw{os.getpid()}", count)
    hub = f"{found.prefix}-hub"
    if not (shutil.which("ip") and shutil.which("tc")) or os.geteuid() != 0:
        pytest.skip("network namespaces need root, ip and tc: several machines are not tested here")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that an ended test run cleans up as well
    try:
        try:
            ip("netns", "add", hub)
        except subprocess.CalledProcessError as error:
            pytest.skip(
                f"network namespaces can't be made here ({error.stderr.strip()}): several machines are not tested"
            )
        ip("-n", hub, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        ip("-n", hub, "link", "set", "bridge", "up")
        for machine in range(count):
            _plug_in(found, hub, machine, rate)
        yield found
    finally:
        found.close()
        for name in [*map(found.name, range(count)), hub]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        signal.signal(signal.SIGTERM, before)


def _plug_in(found: Machines, hub: str, machine: int, rate: str) -> None:
    name, port = found.name(machine), f"p{machine}"
    ip("netns", "add", name)
    ip("link", "add", "eth", "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
    ip("-n", name, "addr", "add", f"{found.address(machine)}/24", "dev", "eth")
    ip("-n", name, "addr", "add", f"fd77::{machine + 1}/64", "dev", "eth", "nodad")
    for device in ("lo", "eth"):
        ip("-n", name, "link", "set", device, "up")
    ip("-n", hub, "link", "set", port, "master", "bridge", "up")
    shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
    subprocess.run(found.inside(machine, "tc", "qdisc", "add", "dev", "eth", *shape), check=True, capture_output=True)
    # the other direction, on the hub's side of the line
    far = ["ip", "netns", "exec", hub, "tc", "qdisc", "add", "dev", port, *shape]
    subprocess.run(far, check=True, capture_output=True)
