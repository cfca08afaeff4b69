"""Machines that train while the faults of a schedule happen to them, and an operator who starts again what ended.

Everything of one run is below one folder:

    disk/machine-M/RUN      run folders, on a small file system of their own
    out/                    what supervisors print
    tmp/, shm/              /tmp and /dev/shm of the run's processes
    clock                   seconds that their wall clock is ahead
    trained.safetensors
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from safetensors.torch import load_file

from tests.distributed.namespaces import ROOT, TOKEN, Machines, machines
from tests.distributed.test_command import ranks_of
from tests.soak import check, model
from tests.soak.sample import Growth, Sampler, growth
from tests.soak.schedule import CHECKPOINT_EVERY, LOST_SECONDS, Fault, Kind, Schedule, SoakPlan

_PATIENCE = 300.0  # seconds without a new step after which there will be none
_POLL_SECONDS = 0.02
_HOLD_SECONDS = 3.0  # how long a rank is stopped, a cable is cut or a disk is full
_LONG_CUT_SECONDS = 2.0 * LOST_SECONDS
_STARTS_KILLED = 2
_MAX_RESTARTS = 1_000_000
_DISK = "24m"
_STOPPED = 2  # exit code of a run that was interrupted
_PORT = 29600
_TAIL = 16384  # bytes of metrics.jsonl that surely hold a step
_IN_MACHINE = 'mount --bind "$0" /dev/shm && exec "$@"'  # `ip netns exec` has made a mount namespace already
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


class SoakFailed(Exception):
    """The run did something that no fault may cause."""


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault that happened, and what it cost."""

    fault: Fault
    at: int  # steps in the metrics
    standstill: float  # seconds
    repeated: int  # steps
    starts: int  # of ranks that it caused


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that ended: what is wrong with it, what happened, and what its processes used."""

    wrong: tuple[str, ...]
    happened: tuple[Happened, ...]
    used: tuple[Growth, ...]
    most_partial: int
    steps: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What an undisturbed run of the same plan left."""

    losses: check.Losses
    weights: Path


@dataclass(frozen=True, slots=True)
class Start:
    """A start of ranks, as the metrics show it: they are taken back to the batch that ranks start from."""

    before: int  # the most steps that had been there
    steps: int  # that are left


class Progress:
    """Reads how far a run is from its metrics."""

    def __init__(self, runs: Path) -> None:
        self.steps = 0  # in the metrics now
        self.most = 0  # ever
        self.starts: list[Start] = []
        self.most_partial = 0
        self._runs = runs
        self._inode = 0

    @property
    def run(self) -> Path | None:
        """Machine 0's run folder, once it exists."""
        return next((path.parent for path in self._runs.glob("machine-0/*/metrics.jsonl")), None)

    def poll(self) -> None:
        run = self.run
        if run is None:
            return
        with suppress(FileNotFoundError), (run / "metrics.jsonl").open("rb") as file:
            about = os.fstat(file.fileno())
            file.seek(max(0, about.st_size - _TAIL))
            self.steps = next((batch + 1 for batch in _step_batches(reversed(file.read().splitlines()))), 0)
            if about.st_ino != self._inode:
                self.starts.append(Start(self.most, self.steps))
                self._inode = about.st_ino
        self.most = max(self.most, self.steps)
        with suppress(OSError):
            names = (path.name for path in (run / "checkpoints").iterdir())
            self.most_partial = max(self.most_partial, check.count_partial(names))

    def has_checkpoint(self) -> bool:
        run = self.run
        return run is not None and any(run.glob("checkpoints/[0-9]*/manifest.json"))


def _step_batches(lines: Iterable[bytes]) -> Iterator[int]:
    for line in lines:
        with suppress(ValueError):  # the first may be half a line, and the last is being written
            record = json.loads(line)
            if record["kind"] == "step":
                yield record["batch"]


def read_losses(run: Path) -> check.Losses:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["batch"], record["loss"]) for record in records if record["kind"] == "step"]


def longest_gap(run: Path, first: int) -> float:
    """The longest time between two steps in a row, by the clock of the ranks, from step `first` - 1 on."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    moments = [r["seconds"] for r in records if r["kind"] == "step" and r["batch"] >= first - 1]
    return max((after - before for before, after in pairwise(moments)), default=0.0)


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
            "STAGEWRIGHT_SOAK_CLOCK": str(self.folder / "clock"),
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

    def leftovers(self) -> list[str]:
        marker = f"STAGEWRIGHT_SOAK_CLOCK={self.folder / 'clock'}".encode()
        listening = [
            f"machine {machine}: {line}"
            for machine in range(self.plan.machines)
            for kind in ("-Htuln", "-Hxl")
            for line in subprocess.run(
                self.network.inside(machine, "ss", kind), capture_output=True, text=True, check=True
            ).stdout.splitlines()
        ]
        empty = [self.folder / "tmp", self.folder / "shm"]
        return check.check_leftovers(self.runs, processes_with(marker), listening, empty)


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


# --- faults -----------------------------------------------------------------------------------------------------------


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
            (soak.folder / "clock").write_text(str(3600 * number))
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


# --- a run ------------------------------------------------------------------------------------------------------------


def endure(soak: Soak, fault: Fault) -> Happened:
    """Wait for a fault's batch, make it happen, and wait until training is past the step at which it happened."""
    progress = soak.progress
    soak.wait(lambda: progress.steps >= fault.batch and progress.has_checkpoint(), f"step {fault.batch}")
    if soak.is_over():
        raise SoakFailed(f"the run ended before {fault} could happen")
    at, starts, began = progress.most, len(progress.starts), time.monotonic()
    apply(soak, fault)
    if not fault.kind.restarts:
        enough = progress.steps + CHECKPOINT_EVERY  # messages that were under way may bring the first steps
        soak.wait(lambda: progress.steps >= enough or soak.is_over(), f"new steps after {fault}")
    soak.wait(lambda: soak.is_over() or _is_past(progress, starts, at, fault), f"a new step after {fault}")
    standstill, caused = time.monotonic() - began, progress.starts[starts:]
    if not caused and progress.run is not None:
        standstill = longest_gap(progress.run, at)
    repeated = max((start.before - start.steps for start in caused), default=0)
    return Happened(fault, at, standstill, repeated, len(caused))


def _is_past(progress: Progress, starts: int, at: int, fault: Fault) -> bool:
    """Whether there is a step that is new since a fault, in the start that it caused, if it causes one."""
    caused = progress.starts[starts:]
    return progress.steps > max(at, *(start.before for start in caused), 0) and bool(caused) >= fault.kind.restarts


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
            for process in processes_with(f"STAGEWRIGHT_SOAK_CLOCK={folder / 'clock'}".encode()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _keep_logs(soak: Soak) -> None:
    """Copy what explains a failure off the disk that is removed."""
    for path in soak.runs.glob("machine-*/*/*"):
        if path.name in ("log.txt", "metrics.jsonl") or path.name == "logs":
            target = soak.folder / "kept" / path.relative_to(soak.runs)
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-r", str(path), str(target)], check=False)


def record(plan: SoakPlan, folder: Path, steps: int) -> Recorded:
    """Train a plan without faults, in one process: with two replicas at most, its bits are those of real ranks."""
    with opened(plan, folder, steps) as soak:
        soak.start(0, is_emulated=True)
        soak.wait(soak.is_over, "the undisturbed run")
        assert soak.progress.run is not None
        return Recorded(read_losses(soak.progress.run), soak.exported)


def run(
    plan: SoakPlan, schedule: Schedule, recorded: Recorded, folder: Path, steps: int, say: Callable[[str], None] = print
) -> Outcome:
    """Train a plan under a schedule of faults, and compare with the undisturbed run."""
    happened: list[Happened] = []
    wrong: list[str] = []
    with opened(plan, folder, steps) as soak, Sampler(soak.processes, lambda: soak.progress.steps) as sampler:
        try:
            soak.start_all()
            for fault in schedule:
                happened.append(endure(soak, fault))
                say(describe(happened[-1]))
            soak.wait(soak.is_over, "the end of the run")
            wrong += compare(soak, recorded) + soak.leftovers()
        except SoakFailed as error:
            wrong.append(str(error))
        used = growth(sampler.samples)
        wrong += check.check_bounds(used, soak.progress.most_partial)
    return Outcome(tuple(wrong), tuple(happened), used, soak.progress.most_partial, soak.progress.most)


def compare(soak: Soak, recorded: Recorded) -> list[str]:
    """What differs from the undisturbed run."""
    assert soak.progress.run is not None
    wrong = check.check_steps(read_losses(soak.progress.run), recorded.losses)
    if not soak.exported.exists():
        return [*wrong, "no weights were exported"]
    return wrong + check.check_weights(load_file(soak.exported), load_file(recorded.weights))


def run_for(plan: SoakPlan, minutes: float, folder: Path, say: Callable[[str], None] = print) -> Outcome:
    """Train without faults for so long, then stop by SIGTERM: whether anything grows."""
    wrong: list[str] = []
    with opened(plan, folder, 10**8) as soak, Sampler(soak.processes, lambda: soak.progress.steps) as sampler:
        try:
            soak.start_all()
            soak.wait(lambda: soak.progress.steps > 0, "the first step")
            end = time.monotonic() + 60 * minutes
            soak.wait(lambda: time.monotonic() > end, "the time to pass")
            began = time.monotonic()
            soak.terminate(0)
            say(f"stopped {time.monotonic() - began:.1f} s after SIGTERM")
            wrong += soak.leftovers()
        except SoakFailed as error:
            wrong.append(str(error))
        used = growth(sampler.samples)
        wrong += check.check_bounds(used, soak.progress.most_partial, slopes=True)
    return Outcome(tuple(wrong), (), used, soak.progress.most_partial, soak.progress.most)


def describe(happened: Happened) -> str:
    return (
        f"step {happened.at:5}  {happened.fault!s:28}  stood still {happened.standstill:6.2f} s  "
        f"{happened.repeated:3} steps repeated  {happened.starts} starts"
    )
