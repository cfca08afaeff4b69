"""Measures transfers between processes: bandwidth and latency of each pair, and the rate of an all-reduce.

One process of the test: `python -m stagewright.runtime.process.link_test RANK WORLD PORT TOKEN PARENT TIMEOUT`."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from stagewright.runtime.comm.channel import ChannelName
from stagewright.runtime.comm.gloo import GlooNetwork
from stagewright.runtime.comm.transport import LOOPBACK, Place
from stagewright.runtime.process.launch import bound_socket
from stagewright.runtime.process.signals import exit_with_parent

_SMALL, _LARGE = 4 << 10, 16 << 20
_REPEATS = 7
_TIMEOUT = 60.0
_RESULT = "result"


def measure_links(ranks: int, timeout: float = _TIMEOUT) -> dict[str, Any]:
    """Start this many processes and return what they measured within `timeout` seconds each.

    Bandwidths are in bytes/s, latencies in seconds.
    """
    token = secrets.token_hex(16)
    with bound_socket() as (listener, port):
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        command = [sys.executable, "-m", "stagewright.runtime.process.link_test"]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                words = [*command, str(rank), str(ranks), str(port), token, str(os.getpid()), str(timeout)]
                running.append(subprocess.Popen(words, start_new_session=True))  # Ctrl-C reaches only this process
            for process in running:
                if process.wait(timeout=timeout):
                    raise ValueError(f"a process of the link test exited with code {process.returncode}; try again")
        except subprocess.TimeoutExpired as error:
            advice = "stop other programs that use the cores, and try again"
            raise ValueError(f"{ranks} processes did not meet within {timeout:.0f} s; {advice}") from error
        finally:
            for process in running:
                process.kill()
                process.wait()
        result: dict[str, Any] = json.loads(PrefixStore(token, store).get(_RESULT))
    return result


def main(arguments: Sequence[str]) -> None:
    """Run one process of the test."""
    rank, world, port, parent = (int(arguments[place]) for place in (0, 1, 2, 4))
    timeout = float(arguments[5])
    exit_with_parent(parent)
    torch.set_num_threads(1)
    store = PrefixStore(arguments[3], TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout)))
    network = GlooNetwork(store, rank, Place(), timeout)
    transfers = []
    for source, target in itertools.combinations(range(world), 2):
        everyone = network.collective(f"pair/{source}-{target}", range(world))
        everyone.sum(torch.zeros(1)).wait()
        if rank in (source, target):
            small, large = (_echo(network, source, target, rank, size) for size in (_SMALL, _LARGE))
            bandwidth = (_LARGE - _SMALL) / max(large - small, 1e-9)
            transfers.append({"source": source, "target": target, "bandwidth": bandwidth, "latency": small})
        everyone.sum(torch.zeros(1)).wait()
    whole = network.collective("reduce", range(world))
    buffer = torch.zeros(_LARGE // 4)
    seconds = _typical(lambda: whole.sum(buffer).wait())
    if rank != 0:
        store.set(f"transfers/{rank}", json.dumps(transfers))
        return
    for other in range(1, world):
        known = {(entry["source"], entry["target"]) for entry in transfers}
        found = json.loads(store.get(f"transfers/{other}"))
        transfers += [entry for entry in found if (entry["source"], entry["target"]) not in known]
    store.set(_RESULT, json.dumps({"transfers": transfers, "reduce": _LARGE / seconds}))


def _echo(network: GlooNetwork, source: int, target: int, rank: int, size: int) -> float:
    """Seconds per message: half of a round trip."""
    there = network.transport(ChannelName("act", size, source, target), 1)
    back = network.transport(ChannelName("grad", size, target, source), 1)
    buffer = torch.zeros(size, dtype=torch.uint8)

    def round_trip() -> None:
        if rank == source:
            there.send(buffer).wait()
            back.receive(buffer).wait()
        else:
            there.receive(buffer).wait()
            back.send(buffer).wait()

    return _typical(round_trip) / 2


def _typical(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS + 2):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
