"""Ranks that torchrun or srun starts: each process of the command supervises one rank, and rank 0 prepares for all.

rank 0                                             other ranks
prepare the job, make its run folder               wait for it, print nothing
publish the folder ──────── store ────────────►    read job.json in that folder
supervise rank 0, collect all events               supervise their rank

From there on the processes meet as machines do (`multinode.meeting`), so a fault anywhere ends all of them with one
report. None of them restarts: torchrun does, with `--max-restarts`, and rank 0 then continues in the same run folder.
The store is torchrun's, or rank 0 hosts it; whoever reaches its port can read and change it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, rendezvous

from stagewright.config.sections import Config
from stagewright.errors import UserError, first_line
from stagewright.runtime.checkpoint.folder import newest_intact
from stagewright.runtime.comm.transport import LOOPBACK
from stagewright.runtime.job import Job
from stagewright.runtime.multinode.meeting import MeetingConfig
from stagewright.runtime.multinode.nodes import RankProcesses, slurm_hosts
from stagewright.runtime.process.supervisor import StartPoint

_POLL_SECONDS = 0.1
_FIRST_PORT, _PORTS = 20000, 10000  # that srun's steps share, below those that Linux gives to clients
_FAILED = "failed"  # published instead of a folder


@dataclass(frozen=True, slots=True)
class ExternalRank:
    """This process's place among those that torchrun or srun has started."""

    launcher: str
    rank: int
    world: int
    host: str  # of the store
    port: int
    attempt: int = 0  # restarts by torchrun so far


def find_rank(config: Config, environment: Mapping[str, str] = os.environ) -> ExternalRank | None:
    """The rank that this process was started for; None where the command starts its ranks itself."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world, port = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        attempt = _number(environment, "TORCHELASTIC_RESTART_COUNT", 0)
        found = ExternalRank("torchrun", rank, world, environment.get("MASTER_ADDR", LOOPBACK), port, attempt)
    elif _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1 and config.nodes.list is None:
        host = environment.get("MASTER_ADDR") or slurm_hosts(environment)[0]
        step = _number(environment, "SLURM_JOB_ID", 0) + 101 * _number(environment, "SLURM_STEP_ID", 0)
        port = _number(environment, "MASTER_PORT", _FIRST_PORT + step % _PORTS)
        rank, world = (_number(environment, name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
        found = ExternalRank("srun", rank, world, host, port)
    else:
        return None
    started = f"{found.launcher} has started {found.world} processes, one per rank"
    if config.nodes.list is not None:
        raise UserError(f"{started}, but --nodes {config.nodes.list} has one command per machine; leave one out")
    if config.run.emulate:
        raise UserError(f"{started}, but --emulate runs all ranks in one; leave one out")
    if config.run.max_restarts is not None:
        raise UserError(f"{started}, and restarts them; give --max-restarts {config.run.max_restarts} to torchrun")
    return found


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or len(text) > 18:
        raise UserError(f"environment variable {name} is {text!r}, not a number; start the command by torchrun or srun")
    return int(text)


@dataclass
class ExternalGroup:
    """What the processes of a run tell each other before they meet; leaving the context early ends the others."""

    place: ExternalRank
    join: float  # seconds to wait for each other
    _store: Store = field(init=False)
    _keys: str = field(init=False)
    _folder_key: str = field(init=False)  # without the attempt: found again after a restart by torchrun
    _is_published: bool = False

    def __post_init__(self) -> None:
        place = self.place
        host = f"[{place.host}]" if ":" in place.host else place.host
        method = f"tcp://{host}:{place.port}?rank={place.rank}&world_size={place.world}"
        try:
            self._store, _, _ = next(rendezvous(method, timeout=timedelta(seconds=self.join)))
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"rank {place.rank} of {place.launcher} can't use the store at {place.host} port {place.port}: "
                f"{first_line(error, 240)}; check MASTER_ADDR and MASTER_PORT"
            ) from error
        runs = self._store.add(f"stagewright/{place.attempt}/runs/{place.rank}", 1)  # a script may train several times
        self._keys, self._folder_key = f"stagewright/{place.attempt}/{runs}", f"stagewright/folder/{runs}"
        self._store.set(f"{self._keys}/host/{place.rank}", socket.gethostname())

    def __enter__(self) -> ExternalGroup:
        return self

    def __exit__(self, *_: object) -> None:
        if self.place.rank == 0 and not self._is_published:
            self._store.set(f"{self._keys}/published", _FAILED)
            self._store.check([_FAILED])  # `set` does not wait until the store has it; `check` does

    def restarted_job(self) -> Job | None:
        """After a restart by torchrun, the job to continue with, from its newest intact checkpoint."""
        if not self.place.attempt or not self._store.check([self._folder_key]):
            return None
        folder = Path(self._store.get(self._folder_key).decode())
        job, (newest, _) = Job.load(folder / "job.json"), newest_intact(folder)
        return job if newest is None else StartPoint(job).job(job, newest.batch)

    def publish(self, job: Job) -> None:
        """Have the other ranks start this job; an error where they are on other machines than the plan says."""
        hosts = self._hosts()
        first: dict[int, int] = {}  # rank of a machine
        for rank, device in enumerate(job.plan.devices):
            other = first.setdefault(device.machine, rank)
            if hosts[other] != hosts[rank]:
                raise UserError(
                    f"the placement has ranks {other} and {rank} on machine {device.machine}, but "
                    f"{self.place.launcher} has started them on {hosts[other]} and {hosts[rank]}; "
                    "give each machine its number in --placement, as in 0:0-1.1:0-1"
                )
        job.save(Path(job.folder) / "job.json")
        self._store.set(self._folder_key, job.folder)
        self._store.set(f"{self._keys}/published", job.folder)
        self._is_published = True

    def receive(self) -> Job | None:
        """The job that rank 0 has prepared; None where it failed to, which it reports itself."""
        folder = self._wait_for(f"{self._keys}/published")
        if folder == _FAILED:
            return None
        path = Path(folder) / "job.json"
        if not path.is_file():
            raise UserError(
                f"rank {self.place.rank} on {socket.gethostname()} can't see {path}, which rank 0 has written; "
                "choose --runs on a shared file system"
            )
        return Job.load(path)

    def meeting(self, job: Job) -> MeetingConfig:
        """How the processes meet once all have the job."""
        hosts = self._hosts()
        address = LOOPBACK if len({device.machine for device in job.plan.devices}) == 1 else self._address(hosts)
        names = tuple(f"rank {rank} ({host})" for rank, host in enumerate(hosts))
        site = RankProcesses(names, self.place.rank, address)
        lost = job.config.nodes.lost_timeout
        return MeetingConfig(self.place.port, self._keys, Path(job.folder), self.join, lost, site, self.place.host)

    def _hosts(self) -> list[str]:
        """The machine of every rank."""
        return [self._wait_for(f"{self._keys}/host/{rank}") for rank in range(self.place.world)]

    def _address(self, hosts: list[str]) -> str:
        """The address from which this machine reaches the store's."""
        found = socket.getaddrinfo(self.place.host, self.place.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing
            address = str(probe.getsockname()[0])
        if len(set(hosts)) > 1 and ipaddress.ip_address(address).is_loopback:
            raise UserError(
                f"MASTER_ADDR {self.place.host} is {address} on {socket.gethostname()}, an address that no other "
                "machine can reach; give the address of the interface to use"
            )
        return address

    def _wait_for(self, key: str) -> str:
        limit = time.monotonic() + self.join
        while not self._store.check([key]):
            if time.monotonic() > limit:
                raise UserError(
                    f"rank {self.place.rank} has waited {self.join:g} s for the other ranks of {self.place.launcher}; "
                    "look at their errors, or raise --join-timeout"
                )
            time.sleep(_POLL_SECONDS)
        return self._store.get(key).decode()
