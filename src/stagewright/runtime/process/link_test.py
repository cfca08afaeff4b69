"""Measures transfers between processes: bandwidth and latency of each pair, and the rate of an all-reduce.

One process of the test: `python -m stagewright.runtime.process.link_test RANK WORLD PORT TOKEN TIMEOUT DEVICE`. On GPUs
the messages are copied through host memory, as gloo has it, and one pair stands for all.
"""

from __future__ import annotations

import itertools
import json
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from stagewright.errors import UserError
from stagewright.runtime.comm.channel import ChannelName
from stagewright.runtime.comm.device import open_device
from stagewright.runtime.comm.gloo import GlooNetwork
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


def measure_links(ranks: int, timeout: float = _TIMEOUT, device: str = "cpu") -> dict[str, Any]:
    """Start this many processes and return what they measured within `timeout` seconds.

    Bandwidths are in bytes/s, latencies in seconds. On GPUs `reduce` is of two ranks, and `host` is what all steps of a
    ring through all ranks get together.
    """
    token = secrets.token_hex(16)
    with bound_socket() as (listener, port):
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        command = [sys.executable, "-m", "stagewright.runtime.process.link_test"]
        with Children() as children:
            for rank in range(ranks):
                children.start([*command, str(rank), str(ranks), str(port), token, str(timeout), device])
            limit = time.monotonic() + timeout
            while any(code != 0 for code in children.codes()):
                if failed := next(filter(None, children.codes()), None):
                    raise UserError(f"a process of the link test exited with code {failed}; try again")
                if time.monotonic() > limit:
                    advice = "stop other programs that use the cores, and try again"
                    raise UserError(f"{ranks} processes did not meet within {timeout:.0f} s; {advice}")
                time.sleep(_POLL_SECONDS)
        result: dict[str, Any] = json.loads(PrefixStore(token, store).get(_RESULT))
    return result


def main(arguments: Sequence[str]) -> None:
    """Run one process of the test."""
    exit_with_parent()
    rank, world, port = map(int, arguments[:3])
    timeout = float(arguments[4])
    torch.set_num_threads(1)
    store = PrefixStore(arguments[3], TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout)))
    device = open_device(arguments[5], rank, share=True)
    network = GlooNetwork(store, rank, Place(), timeout, device)
    transfers = []
    pairs = list(itertools.combinations(range(world), 2))
    for source, target in pairs if arguments[5] == "cpu" else pairs[:1]:
        everyone = network.collective(f"pair/{source}-{target}", range(world))
        everyone.sum(torch.zeros(1)).wait()
        if rank in (source, target):
            small, large = (_echo(network, source, target, rank, size, device.device) for size in (_SMALL, _LARGE))
            bandwidth = (_LARGE - _SMALL) / max(large - small, 1e-9)
            transfers.append({"source": source, "target": target, "bandwidth": bandwidth, "latency": small})
        everyone.sum(torch.zeros(1)).wait()
    everyone = network.collective("reduce", range(world))
    result: dict[str, Any] = {"reduce": _sum_rate(everyone, device.device)}
    if arguments[5] != "cpu":  # a few ranks alone get more each than all of them at once
        result["host"] = 2 * (world - 1) * result["reduce"]
        pair = network.collective("reduce two", [0, 1] if rank < 2 else [rank])
        result["reduce"] = _sum_rate(pair, device.device)
    if rank != 0:
        store.set(f"transfers/{rank}", json.dumps(transfers))
        return
    for other in range(1, world):
        known = {(entry["source"], entry["target"]) for entry in transfers}
        found = json.loads(store.get(f"transfers/{other}"))
        transfers += [entry for entry in found if (entry["source"], entry["target"]) not in known]
    store.set(_RESULT, json.dumps({"host": None, **result, "transfers": transfers}))


def _echo(network: GlooNetwork, source: int, target: int, rank: int, size: int, device: torch.device) -> float:
    """Seconds per message: half of a round trip."""
    there = network.transport(ChannelName("act", size, source, target), 1)
    back = network.transport(ChannelName("grad", size, target, source), 1)
    on_gpu = device.type == "cuda"
    buffer = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
    tensor = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else buffer

    def send(transport: Transport) -> None:
        if on_gpu:
            buffer.copy_(tensor)
        transport.send(buffer).wait()

    def receive(transport: Transport) -> None:
        transport.receive(buffer).wait()
        if on_gpu:
            tensor.copy_(buffer)

    def round_trip() -> None:
        if rank == source:
            send(there)
            receive(back)
        else:
            receive(there)
            send(back)

    return _typical(round_trip) / 2


def _sum_rate(collective: Collective, device: torch.device) -> float:
    """Bytes per second of a sum."""
    buffer = torch.zeros((_LARGE if device.type == "cpu" else _GPU_SUM) // 4, device=device)

    def reduce() -> None:
        collective.sum(buffer).wait()
        if buffer.is_cuda:  # also for the copies that end it
            torch.cuda.synchronize()

    return buffer.nbytes / _typical(reduce)


def _typical(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS + 2):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
