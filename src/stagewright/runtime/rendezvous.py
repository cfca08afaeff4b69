"""Where machines meet before every start: a store that we made, and an order that the plan gives."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from stagewright.runtime.place import LOOPBACK


class Rendezvous(RendezvousHandler):
    """Asks the supervisor before every start; that may refuse by raising."""

    def __init__(self, begin: Callable[[], Store], machine: int, machines: int, port: int) -> None:
        self._begin = begin
        self._machine = machine
        self._machines = machines
        self._port = port

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "stagewright"

    def next_rendezvous(self) -> RendezvousInfo:
        store = self._begin()
        return RendezvousInfo(store, self._machine, self._machines, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "rank"  # torch names folders by it, so the token stays out of it

    def shutdown(self) -> bool:
        return True
