"""One run of a plan: its machines in network namespaces, its processes, its disk.

Everything of one run is below one folder:

    disk/machine-M/RUN      run folders, on a small file system of their own
    out/                    what supervisors print
    tmp/, shm/              /tmp and /dev/shm of the run's processes
    clock                   seconds that their wall clock is ahead
    trained.safetensors
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.distributed.namespaces import ROOT, TOKEN, Machines, machines
from tests.distributed.test_command import ranks_of
from tests.soak import check, model
from tests.soak.progress import Progress
from tests.soak.schedule import CHECKPOINT_EVERY, LOST_SECONDS, SoakPlan

_PATIENCE = 300.0  # seconds without a new step after which there will be none
_POLL_SECONDS = 0.02
_MAX_RESTARTS = 1_000_000
_DISK = "24m"
_STOPPED = 2  # exit code of a run that was interrupted
_CLOCK = "STAGEWRIGHT_SOAK_CLOCK"
_IN_MACHINE = 'mount --bind "$0" /dev/shm && exec "$@"'  # `ip netns exec` has made a mount namespace already


class SoakFailed(Exception):
    """The run did something that no fault may cause."""


@dataclass
class Soak:
    """One run of a plan: its machines, its supervisors, and what an operator does with them."""

    plan: SoakPlan
    network: Machines  # one namespace per machine, and one for strangers
    folder: Path
    steps: int
    supervisors: dict[int, subprocess.Popen[str]] = field(default_factory=dict)  # by machine
    is_resumed: bool = False  # whether machine 0's command resumes
    _started: int = 0

    def __post_init__(self) -> None:
        for name in ("out", "tmp", "shm"):
            (self.folder / name).mkdir()
        self.progress = Progress(self.runs)

    @property
    def runs(self) -> Path:
        return self.folder / "disk"

    @property
    def clock(self) -> Path:
        """Holds the seconds that the wall clock of the run's processes is ahead."""
        return self.folder / "clock"

    @property
    def exported(self) -> Path:
        return self.folder / "trained.safetensors"

    def start(self, machine: int, *, is_emulated: bool = False) -> None:
        """Start the command on a machine: the first one, or once that was resumed the one that resumes."""
        arguments = ["--runs", str(self.runs / f"machine-{machine}")]
        if is_emulated:
            arguments.append("--emulate")
        elif not self.is_resumed:
            arguments += ["--max-restarts", str(_MAX_RESTARTS)]
        if self.plan.machines > 1 and not is_emulated:
            nodes = ",".join(map(self.network.address, range(self.plan.machines)))
            arguments += ["--nodes", nodes, "--lost-timeout", str(LOST_SECONDS), "--join-timeout", str(_PATIENCE)]
        arguments += ["--resume", str(self.progress.run)] if self.is_resumed else self._options()
        command = [sys.executable, "-m", "stagewright", "train", *arguments]
        inside = self.network.inside(machine, "sh", "-c", _IN_MACHINE, str(self.folder / "shm"), *command)
        self._started += 1
        path = self.folder / "out" / f"{self._started:03}-machine-{machine}.txt"
        with path.open("w") as out:
            process = subprocess.Popen(
                inside,
                cwd=ROOT,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.network.processes.append(process)
        self.supervisors[machine] = process

    def start_all(self) -> None:
        for machine in range(self.plan.machines):
            self.start(machine)

    def terminate(self, machine: int) -> None:
        """Ask a supervisor to stop, and wait until all have, with a checkpoint."""
        self.supervisors[machine].send_signal(signal.SIGTERM)
        self.wait(self.is_over, "all supervisors to stop", may_exit=True)
        if any(process.returncode != _STOPPED for process in self.supervisors.values()):
            raise SoakFailed(f"not stopped by SIGTERM: {self.last_lines()}")

    def environment(self) -> dict[str, str]:
        path = [str(Path(__file__).parent / "clock"), os.environ.get("PYTHONPATH", "")]
        return os.environ | {
            "STAGEWRIGHT_TOKEN": TOKEN,
            _CLOCK: str(self.clock),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "TMPDIR": str(self.folder / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "torch"),  # which torch would leave in /tmp
            "OMP_NUM_THREADS": "1",
        }

    def _options(self) -> list[str]:
        options: dict[str, object] = {
            "model": "tests.soak.model:small",
            "image": model.IMAGE,
            "cut": model.CUT,
            "placement": self.plan.placement,
            "mode": self.plan.mode,
            "batch": 16,
            "samples": 256,
            "lr": 0.001,
            "steps": self.steps,
            "checkpoint-every": CHECKPOINT_EVERY,
            "log-every": 100,
            "export": self.exported,
        }
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]

    def processes(self) -> dict[str, int]:
        """The supervisors and ranks that run now, by role."""
        ranks = ranks_by_number(self.runs)
        found = {f"supervisor {machine}": process.pid for machine, process in self.supervisors.items()}
        return found | {f"rank {rank}": process for rank, process in ranks.items()}

    def wait(self, condition: Callable[[], bool], what: str, *, may_exit: bool = False) -> None:
        """Poll the progress until something happens; fail where nothing moves, or a supervisor ends."""
        limit, most = time.monotonic() + _PATIENCE, self.progress.most
        while True:
            self.progress.poll()
            ended = [machine for machine, process in self.supervisors.items() if process.poll()]
            if ended and not may_exit:
                raise SoakFailed(
                    f"the supervisor of machine {ended[0]} failed, waiting for {what}: {self.last_lines()}"
                )
            if condition():
                return
            if self.progress.most > most:
                limit, most = time.monotonic() + _PATIENCE, self.progress.most
            if time.monotonic() > limit:
                raise SoakFailed(f"waited {_PATIENCE:.0f} s for {what}: {self.last_lines()}")
            time.sleep(_POLL_SECONDS)

    def last_lines(self) -> str:
        """The last line that each supervisor printed."""
        texts = {path.name: path.read_text().splitlines() for path in sorted((self.folder / "out").iterdir())}
        newest = list(texts.items())[-self.plan.machines :]
        return "; ".join(f"{name}: {lines[-1] if lines else 'nothing'}" for name, lines in newest)

    def hold(self, seconds: float) -> None:
        """Leave a fault's cause as it is for so long."""
        limit = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > limit, "the cause of a fault to end", may_exit=True)

    def is_over(self) -> bool:
        return all(process.poll() is not None for process in self.supervisors.values())

    def rank(self, number: int) -> int:
        """The process of a rank that runs now."""
        self.wait(lambda: number in ranks_by_number(self.runs), f"rank {number}")
        return ranks_by_number(self.runs)[number]

    def all_processes(self) -> list[int]:
        """Whatever this run has started, and whatever that has started, also if nobody knows of it any more."""
        return processes_with(f"{_CLOCK}={self.clock}".encode())

    def leftovers(self) -> list[str]:
        listening = [
            f"machine {machine}: {line}"
            for machine in range(self.plan.machines)
            for kind in ("-Htuln", "-Hxl")
            for line in subprocess.run(
                self.network.inside(machine, "ss", kind), capture_output=True, text=True, check=True
            ).stdout.splitlines()
        ]
        empty = [self.folder / "tmp", self.folder / "shm"]
        return check.check_leftovers(self.runs, self.all_processes(), listening, empty)


def ranks_by_number(runs: Path) -> dict[int, int]:
    """Process ids of the ranks whose job is under a folder."""
    found: dict[int, int] = {}
    for process in ranks_of(runs):
        with suppress(OSError, StopIteration):
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            found[next(int(item[5:]) for item in variables if item.startswith(b"RANK="))] = process
    return found


def processes_with(variable: bytes) -> list[int]:
    """Process ids whose environment has this variable."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and variable in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@contextmanager
def opened(plan: SoakPlan, folder: Path, steps: int) -> Iterator[Soak]:
    """The machines and the disk of a run; all processes are ended and both are removed at the end."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    with ExitStack() as stack:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(disk)], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
        network = stack.enter_context(machines(plan.machines + 1))
        soak = Soak(plan, network, folder, steps)
        try:
            yield soak
        finally:
            _keep_logs(soak)
            for process in soak.all_processes():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _keep_logs(soak: Soak) -> None:
    """Copy what explains a failure off the disk that is removed."""
    for path in soak.runs.glob("machine-*/*/*"):
        if path.name in ("log.txt", "metrics.jsonl") or path.name == "logs":
            target = soak.folder / "kept" / path.relative_to(soak.runs)
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-r", str(path), str(target)], check=False)
