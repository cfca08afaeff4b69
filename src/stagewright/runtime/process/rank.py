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
from functools import cache, partial
from pathlib import Path

import torch
from safetensors.torch import load, save, save_file
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore

from stagewright.events import Emit, Event, Finished, Ready, Stopped, encode
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
from stagewright.runtime.process.assemble import assemble
from stagewright.runtime.process.object_pipe import receive_objects
from stagewright.runtime.process.signals import exit_with_parent
from stagewright.runtime.process.spare import COMPILES, SPARE, wait_for_rank
from stagewright.runtime.process.torch_flags import keep_freed_memory, set_flags
from stagewright.runtime.stage.recorder import make_recorder
from stagewright.runtime.stage.worker import Worker
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
    job = Job.load(path)
    rank, keys = int(os.environ["RANK"]), os.environ[KEYS]
    logging.basicConfig(format="%(message)s")  # to stderr.log of this rank
    logging.getLogger("stagewright").setLevel(logging.INFO)
    torch.set_num_threads(job.config.run.threads or 1)
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store, events = (
        PrefixStore(keys, TCPStore(*address, is_master=False, timeout=timedelta(seconds=job.patience)))
        for _ in range(2)
    )

    def emit(event: Event) -> None:
        events.queue_push(EVENTS, encode(event))

    try:
        receive_objects()
        run_rank(job, rank, store, emit, events)
    except BaseException as error:
        if isinstance(error, torch.OutOfMemoryError):
            emit(shortage_of(rank))
        action = last_action(status_path(Path(job.folder), rank), rank)
        is_secondary = isinstance(error, LostPeer)
        emit(failure_of(rank, action, error, job.plan.samples, is_secondary=is_secondary))
        if is_secondary:
            time.sleep(_BLAME_SECONDS)  # let the supervisor see the exit of the rank that caused it first
        traceback.print_exc()
        exit_now(1)
    exit_now(0)


def run_rank(job: Job, rank: int, store: Store, emit: Emit, control: Store | None = None) -> None:
    """Build a rank's worker, run its job, and leave its weights and trace; pauses are requested through `control`."""
    folder = Path(job.folder)
    set_flags(job.config)
    keep_freed_memory()
    device = open_device(job.config.run.device, job.plan.devices[rank].index, share=job.config.run.share_gpu)
    network = open_network(job.config, store, rank, Place.of(job.plan, rank), job.patience, device)
    recorder = make_recorder(status_path(folder, rank), device)
    worker = assemble(job, rank, network, emit, recorder, device)
    worker.saver = DiskSaver(job, worker, emit, partial(settled_batch, control))
    if job.resume is not None:
        restore(worker, open_checkpoint(Path(job.resume)))
    emit(Ready(rank, time.monotonic(), clock_name()))
    pauses = Pauses(control, rank, job.plan, worker.gate, job.config.checkpoint.minutes) if control else None
    drive(worker)
    if pauses is not None:
        pauses.close()
    recorder.save()
    if worker.is_stopped:
        emit(Stopped(rank, worker.done))
    elif job.export:
        gather_weights(worker, folder, network.host)
    emit(Finished(rank, recorder.spans()))


def settled_batch(control: Store | None) -> int:
    """The newest checkpoint that the supervisor has dealt with; `NEVER` where no supervisor commits any."""
    return int(control.get(SETTLED)) if control is not None and control.check([SETTLED]) else NEVER


@cache
def clock_name() -> str:
    """Which monotonic clock this process reads: that of one boot of one machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def drive(worker: Worker) -> None:
    """Run a worker's job to its end."""
    for pending in worker.run():
        wait_for(pending)


def state_file(folder: Path, stage: int) -> Path:
    return folder / "ranks" / f"stage-{stage}.safetensors"


def gather_weights(worker: Worker, folder: Path, network: Network) -> None:
    """Leave every stage's weights on machine 0: its first replica writes them, or sends them to rank 0."""
    for item in worker.states():
        if not isinstance(item, tuple):
            wait_for(item)
            continue
        stage, state = item
        tensors = {name: tensor.contiguous().clone().cpu() for name, tensor in state.items()}
        if _is_remote(worker.plan, stage):
            _send_weights(network, stage, tensors)
        else:
            _save_weights(tensors, state_file(folder, stage.index))
    if worker.rank == 0:
        for stage in worker.plan.stages:
            if _is_remote(worker.plan, stage):
                _save_weights(_receive_weights(network, stage), state_file(folder, stage.index))


def _save_weights(weights: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have deleted the run folder meanwhile
    save_file(weights, path)


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


def exit_now(code: int) -> None:
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
