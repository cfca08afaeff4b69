"""Measures transfers between processes: bandwidth and latency of each pair, and the rate of an all-reduce.

One process of the test: `python -m stagewright.runtime.process.link_test RANK WORLD PORT TOKEN TIMEOUT`."""

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
from stagewright.runtime.comm.gloo import GlooNetwork
from stagewright.runtime.comm.transport import LOOPBACK, Place
from stagewright.runtime.process.children import Children
from stagewright.runtime.process.launch import bound_socket
from stagewright.runtime.process.signals import exit_with_parent

_SMALL, _LARGE = 4 << 10, 16 << 20
_REPEATS = 7
_TIMEOUT = 60.0
_RESULT = "result"
_POLL_SECONDS = 0.05


def measure_links(ranks: int, timeout: float = _TIMEOUT) -> dict[str, Any]:
    """Start this many processes and return what they measured within `timeout` seconds.

    Bandwidths are in bytes/s, latencies in seconds.
    """
    token = secrets.token_hex(16)
    with bound_socket() as (listener, port):
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        command = [sys.executable, "-m", "stagewright.runtime.process.link_test"]
        with Children() as children:
            for rank in range(ranks):
                children.start([*command, str(rank), str(ranks), str(port), token, str(timeout)])
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
