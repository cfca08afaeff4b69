"""The process of one rank: `python -m stagewright.runtime.process.rank JOB`, started by the supervisor.

With `--spare` in place of a job it was started before there was one, and waits for it.

It builds its worker, runs the job, sends events through the store, and leaves the weights of its stages for export."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch
from safetensors.torch import load, save, save_file
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore

from stagewright.events import Emit, Event, Failure, Finished, Ready, Stopped, encode
from stagewright.plan.plan import Plan, Stage
from stagewright.runtime.checkpoint.folder import open_checkpoint
from stagewright.runtime.checkpoint.load import restore
from stagewright.runtime.checkpoint.pauses import Pauses
from stagewright.runtime.checkpoint.save import DiskSaver
from stagewright.runtime.comm.channel import ChannelName, Network
from stagewright.runtime.comm.device import open_device
from stagewright.runtime.comm.message import FormatError
from stagewright.runtime.comm.nccl import open_network
from stagewright.runtime.comm.transport import LostPeer, Pending, Place
from stagewright.runtime.faults import failure_of, shortage_of
from stagewright.runtime.job import NEVER, Job
from stagewright.runtime.process.assemble import ScriptParts, assemble
from stagewright.runtime.process.children import COMPILES, SPARE, wait_for_rank
from stagewright.runtime.process.object_pipe import receive_objects
from stagewright.runtime.process.session import Session
from stagewright.runtime.process.signals import exit_with_parent
from stagewright.runtime.process.torch_flags import keep_freed_memory, set_flags
from stagewright.runtime.stage.recorder import make_recorder
from stagewright.runtime.status_file import last_action, status_path

EVENTS = "events"
SETTLED = "settled"  # batch of the newest checkpoint that the supervisor has committed or given up
HISTORY = "history"  # what a script's loop saw before this start
JOB = "STAGEWRIGHT_JOB"  # environment variable: the file of the job
KEYS = "STAGEWRIGHT_KEYS"  # environment variable: prefix of the store keys of this start
_BLAME_SECONDS = 2.0
_PIECE = 64 << 20  # bytes


def main() -> None:
    """Run one rank of a job to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the supervisor decides what it means
    exit_with_parent()
    gc.freeze()  # what is imported stays: the garbage collector does not look at it, and the process ends sooner
    arguments = sys.argv[1:]
    if SPARE not in arguments:
        run_process(Path(arguments[0]))
        return
    with suppress(Exception):  # what fails here fails again where the rank needs it, and is reported there
        _warm_up(compiles=COMPILES in arguments)
    path = wait_for_rank()
    if path is not None:
        run_process(path)


def _warm_up(*, compiles: bool) -> None:
    """Load what takes long, while nobody waits for it."""
    torch.optim.SGD([torch.zeros(1)])  # imports a part of the compiler, compiled or not
    if compiles:
        torch.compile(torch.nn.Identity())  # imports the rest
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]


def run_process(path: Path) -> None:
    """Run the rank that the environment names, of the job in a file, and end this process."""
    logging.basicConfig(format="%(message)s")  # to stderr.log of this rank
    logging.getLogger("stagewright").setLevel(logging.INFO)
    job = Job.load(path)
    rank = Rank(job, int(os.environ["RANK"]), *join(job))
    try:
        receive_objects()
        rank.run()
    except BaseException as error:
        rank.fail(error)
    exit_now(0)


def join(job: Job) -> tuple[Store, Store]:
    """Two connections to the keys of this start: one for messages between ranks, one for the supervisor."""
    torch.set_num_threads(job.config.run.threads or 1)
    address, keys = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), os.environ[KEYS]
    patience = timedelta(seconds=job.patience)
    first, second = (PrefixStore(keys, TCPStore(*address, is_master=False, timeout=patience)) for _ in range(2))
    return first, second


class Rank:
    """This process's rank of a job: its worker, and its connections to the other ranks and to the supervisor."""

    def __init__(self, job: Job, rank: int, store: Store, control: Store, emit: Emit | None = None) -> None:
        """Pauses are requested through `control`, and events go there unless `emit` takes them."""
        self.job = job
        self.rank = rank
        self.emit = emit or self._send
        self._folder = Path(job.folder)
        self._store = store
        self._control = control

    def open(self, script: ScriptParts | None = None) -> Session:
        """Build the rank's worker and connect it with the others."""
        job, rank = self.job, self.rank
        set_flags(job.config)
        keep_freed_memory()
        device = open_device(job.config.run.device, job.plan.devices[rank].index, share=job.config.run.share_gpu)
        self._network = open_network(job.config, self._store, rank, Place.of(job.plan, rank), job.patience, device)
        self._recorder = make_recorder(status_path(self._folder, rank), device)
        worker = assemble(job, rank, self._network, self.emit, self._recorder, device, script)
        worker.saver = DiskSaver(job, worker, self.emit, self._settled)
        if job.resume is not None:
            restore(worker, open_checkpoint(Path(job.resume)))
        self.emit(Ready(rank, time.monotonic(), clock_name()))
        self._pauses = Pauses(self._control, rank, job.plan, worker.gate, job.config.checkpoint.minutes)
        self.session = Session(job, [worker], wait_for)
        return self.session

    def run(self) -> None:
        """Run the job to its end, and leave the weights if it wants them."""
        self.open().run()
        self._pauses.close()
        if self.job.export and not self.session.is_stopped:
            self.gather_weights()
        self.close()

    def close(self) -> None:
        """Report the end of this rank, once what is being written is written."""
        self.session.close()
        self._pauses.close()
        if self.session.is_stopped:
            self.emit(Stopped(self.rank, self.session.done))
        self.emit(Finished(self.rank, self._recorder.spans()))

    def fail(self, error: BaseException) -> NoReturn:
        """Report what ends this rank, and end it."""
        if isinstance(error, torch.OutOfMemoryError):
            self.emit(shortage_of(self.rank))
        self.emit(self._failure(error))
        if isinstance(error, LostPeer):
            time.sleep(_BLAME_SECONDS)  # let the supervisor see the exit of the rank that caused it first
        traceback.print_exception(error)
        exit_now(1)

    def gather_weights(self) -> None:
        """Leave every stage's weights on machine 0: its first replica writes them, or sends them to rank 0."""
        plan, network = self.job.plan, self._network.host
        for index, weights in self.session.states().items():
            if _is_remote(plan, plan.stages[index]):
                _send_weights(network, plan.stages[index], weights)
            else:
                self._save_weights(weights, index)
        for stage in plan.stages if self.rank == 0 else ():
            if _is_remote(plan, stage):
                self._save_weights(_receive_weights(network, stage), stage.index)

    def _save_weights(self, weights: dict[str, Tensor], stage: int) -> None:
        path = state_file(self._folder, stage)
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have deleted the run folder meanwhile
        save_file(weights, path)

    def _send(self, event: Event) -> None:
        self._control.queue_push(EVENTS, encode(event))

    def _settled(self) -> int:
        """The newest checkpoint that the supervisor has dealt with; `NEVER` where no supervisor commits any."""
        return int(self._control.get(SETTLED)) if self._control.check([SETTLED]) else NEVER

    def _failure(self, error: BaseException) -> Failure:
        action = last_action(status_path(self._folder, self.rank), self.rank)
        return failure_of(self.rank, action, error, self.job.plan.samples, is_secondary=isinstance(error, LostPeer))


@cache
def clock_name() -> str:
    """Which monotonic clock this process reads: that of one boot of one machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def state_file(folder: Path, stage: int) -> Path:
    return folder / "ranks" / f"stage-{stage}.safetensors"


def _is_remote(plan: Plan, stage: Stage) -> bool:
    """Whether a stage's first replica is on another machine than rank 0."""
    return plan.devices[stage.ranks[0]].machine != plan.devices[0].machine


def _send_weights(network: Network, stage: Stage, weights: Mapping[str, Tensor]) -> None:
    content = torch.frombuffer(bytearray(save(dict(weights))), dtype=torch.uint8)
    name = _weights_channel(stage)
    network.store.set(str(name), str(len(content)))
    transport = network.transport(name, 1)
    for piece in torch.split(content, _PIECE):
        transport.send(piece).wait()


def _receive_weights(network: Network, stage: Stage) -> dict[str, Tensor]:
    name = _weights_channel(stage)
    transport = network.transport(name, 1)
    content = torch.empty(int(network.store.get(str(name))), dtype=torch.uint8)
    for piece in torch.split(content, _PIECE):
        transport.receive(piece).wait()
    return load(content.numpy().tobytes())


def _weights_channel(stage: Stage) -> ChannelName:
    return ChannelName("state", stage.index, stage.ranks[0], 0)


def exit_now(code: int) -> NoReturn:
    """Exit without cleaning up: that takes seconds on a busy machine, and a thread of gloo may abort it."""
    with suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def wait_for(pending: Pending) -> None:
    """Wait for an operation with another rank; `LostPeer` where that is gone."""
    try:
        pending.wait()
    except FormatError:
        raise
    except RuntimeError as error:
        raise LostPeer.because(error) from error


if __name__ == "__main__":
    main()
