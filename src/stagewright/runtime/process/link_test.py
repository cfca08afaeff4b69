"""Measures transfers between processes: bandwidth and latency of each pair, and the rate of an all-reduce.

One process of the test: `python -m stagewright.runtime.process.link_test RANK WORLD PORT TOKEN TIMEOUT DEVICE BACKEND`.
Over gloo, messages of GPUs are copied through host memory and one pair stands for all; sums go through shared memory,
as in a run on one machine. Over NCCL, which needs a GPU for each process, neighbours of a ring are measured. What
arrives is compared with what was sent.
"""

from __future__ import annotations

import itertools
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from stagewright.errors import UserError
from stagewright.runtime.comm.channel import ChannelName, Network
from stagewright.runtime.comm.device import Device, Gpu, open_device
from stagewright.runtime.comm.gloo import GlooNetwork
from stagewright.runtime.comm.nccl import NcclNetwork
from stagewright.runtime.comm.transport import LOOPBACK, Collective, Place, Transport
from stagewright.runtime.process.children import Children
from stagewright.runtime.process.launch import bound_socket
from stagewright.runtime.process.signals import exit_with_parent

_SMALL, _LARGE = 4 << 10, 16 << 20
_GPU_SUM = 128 << 20  # bytes: as a gradient, of many pieces
_REPEATS = 7
_TIMEOUT = 60.0
_RESULT = "result"
_POLL_SECONDS = 0.05


def measure_links(ranks: int, timeout: float = _TIMEOUT, device: str = "cpu", backend: str = "gloo") -> dict[str, Any]:
    """Start this many processes and return what they measured within `timeout` seconds.

    Bandwidths are in bytes/s, latencies in seconds. On GPUs over gloo `reduce` is of two ranks, and `host` is what all
    steps of a ring through all ranks would get together, to be as fast as a sum of all. `gloo_reduce` and `gloo_host`
    are those of sums over gloo, as stock PyTorch has them. `wrong` names each message and sum that arrived otherwise.
    """
    token = secrets.token_hex(16)
    with bound_socket() as (listener, port), tempfile.TemporaryDirectory() as folder:
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        command = [sys.executable, "-m", "stagewright.runtime.process.link_test"]
        errors = [Path(folder) / f"{rank}.err" for rank in range(ranks)]
        with Children() as children:
            for rank in range(ranks):
                words = map(str, (rank, ranks, port, token, timeout, device, backend))
                children.start([*command, *words], stderr=errors[rank])
            limit = time.monotonic() + timeout
            while any(code != 0 for code in children.codes()):
                for code, file in zip(children.codes(), errors, strict=True):
                    if code:
                        why = (file.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
                        raise UserError(f"a process of the link test over {backend} failed: {why}; try again")
                if time.monotonic() > limit:
                    advice = "stop other programs that use the cores, and try again"
                    raise UserError(
                        f"{ranks} processes could not connect over {backend} within {timeout:.0f} s; {advice}"
                    )
                time.sleep(_POLL_SECONDS)
        result: dict[str, Any] = json.loads(PrefixStore(token, store).get(_RESULT))
    return result


def main(arguments: Sequence[str]) -> None:
    """Run one process of the test."""
    exit_with_parent()
    rank, world, port = map(int, arguments[:3])
    timeout, kind, backend = float(arguments[4]), *arguments[5:]
    torch.set_num_threads(1)
    store = PrefixStore(arguments[3], TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout)))
    device = open_device(kind, rank, share=backend == "gloo")
    network: Network = GlooNetwork(store, rank, Place(), timeout, device)
    if backend == "nccl" and isinstance(device, Gpu):
        network = NcclNetwork(store, rank, Place(), timeout, device)
    transfers, wrong = [], []
    for source, target in _pairs(world, kind, backend):
        everyone = network.host.collective(f"pair/{source}-{target}", range(world))
        everyone.sum(torch.zeros(1)).wait()
        if rank in (source, target):
            small, large = (Echo(network, source, target, rank, size, device) for size in (_SMALL, _LARGE))
            wrong += [str(echo) for echo in (small, large) if not echo.is_right()]
            latency, seconds = _typical(small.round_trip) / 2, _typical(large.round_trip) / 2
            bandwidth = (_LARGE - _SMALL) / max(seconds - latency, 1e-9)
            transfers.append({"source": source, "target": target, "bandwidth": bandwidth, "latency": latency})
        everyone.sum(torch.zeros(1)).wait()
    reducing = network.collective("reduce", range(world))
    if not is_sum_right(reducing, rank, world, device.device):
        wrong.append(f"sum of {world} ranks at rank {rank}")
    result: dict[str, Any] = {"gloo_reduce": None, "gloo_host": None}
    if backend == "nccl":
        result |= {"reduce": _sum_rate(reducing, device.device), "host": None}
    else:
        result |= _sum_rates(network, reducing, rank, world, device.device)
        apart = GlooNetwork(PrefixStore("gloo", store), rank, Place(local=frozenset({rank})), timeout, device)
        stock = _sum_rates(apart, apart.collective("reduce", range(world)), rank, world, device.device)
        result |= {f"gloo_{name}": rate for name, rate in stock.items()}
    if rank != 0:
        store.set(f"found/{rank}", json.dumps([transfers, wrong]))
        return
    for other in range(1, world):
        known = {(entry["source"], entry["target"]) for entry in transfers}
        found, its_wrong = json.loads(store.get(f"found/{other}"))
        transfers += [entry for entry in found if (entry["source"], entry["target"]) not in known]
        wrong += its_wrong
    store.set(_RESULT, json.dumps({**result, "transfers": transfers, "wrong": wrong}))


def _pairs(world: int, kind: str, backend: str) -> list[tuple[int, int]]:
    """The pairs to measure."""
    if backend == "nccl":  # a communicator takes long to open, so only neighbours
        return sorted({(min(rank, (rank + 1) % world), max(rank, (rank + 1) % world)) for rank in range(world)})
    pairs = list(itertools.combinations(range(world), 2))
    return pairs if kind == "cpu" else pairs[:1]


class Echo:
    """A message that one rank sends to another, which sends it back."""

    def __init__(self, network: Network, source: int, target: int, rank: int, size: int, device: Device) -> None:
        self._name = f"message of {size} bytes between ranks {source} and {target} at rank {rank}"
        self._there = network.transport(ChannelName("act", size, source, target), 1)
        self._back = network.transport(ChannelName("grad", size, target, source), 1)
        self._is_source = rank == source
        self._sent = torch.arange(size, device=device.device).remainder(251).to(torch.uint8)
        self._received = torch.zeros_like(self._sent)
        is_staged = self._sent.is_cuda and isinstance(network, GlooNetwork)
        self._buffer = torch.zeros(size, dtype=torch.uint8, pin_memory=True) if is_staged else None

    def __str__(self) -> str:
        return self._name

    def is_right(self) -> bool:
        """Whether the message arrives as it was sent, there and back."""
        self._received.zero_()
        self.round_trip()
        return torch.equal(self._received, self._sent)

    def round_trip(self) -> None:
        if self._is_source:
            self._send(self._there, self._sent)
            self._receive(self._back)
        else:
            self._receive(self._there)
            self._send(self._back, self._received)

    def _send(self, transport: Transport, tensor: Tensor) -> None:
        if self._buffer is not None:
            self._buffer.copy_(tensor)
        transport.send(tensor if self._buffer is None else self._buffer).wait()
        _synchronize(tensor)

    def _receive(self, transport: Transport) -> None:
        transport.receive(self._received if self._buffer is None else self._buffer).wait()
        if self._buffer is not None:
            self._received.copy_(self._buffer)
        _synchronize(self._received)


def is_sum_right(collective: Collective, rank: int, world: int, device: torch.device) -> bool:
    """Whether the ranks' numbers, from 1 on, add up."""
    buffer = torch.full((_LARGE // 4,), float(rank + 1), device=device)
    collective.sum(buffer).wait()
    _synchronize(buffer)
    return bool((buffer == world * (world + 1) / 2).all())


def _sum_rates(
    network: Network, reducing: Collective, rank: int, world: int, device: torch.device
) -> dict[str, float | None]:
    """The rates of sums through host memory; on a GPU a few ranks alone get more each than all of them at once."""
    everyone = _sum_rate(reducing, device)
    if device.type == "cpu":
        return {"reduce": everyone, "host": None}
    pair = network.collective("reduce two", [0, 1] if rank < 2 else [rank])
    return {"reduce": _sum_rate(pair, device), "host": 2 * (world - 1) * everyone}


def _sum_rate(collective: Collective, device: torch.device) -> float:
    """Bytes per second of a sum."""
    buffer = torch.zeros((_LARGE if device.type == "cpu" else _GPU_SUM) // 4, device=device)

    def reduce() -> None:
        collective.sum(buffer).wait()
        _synchronize(buffer)  # also for the copies that end it

    return buffer.nbytes / _typical(reduce)


def _synchronize(tensor: Tensor) -> None:
    """Wait for what is queued on a tensor's GPU: over NCCL, waiting for an operation only orders it."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


def _typical(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS + 2):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
