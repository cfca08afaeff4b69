"""Machines, their devices, and the links between them.

A machine has levels of groups of devices, innermost first, each with a link; messages share the edges between levels.
Devices have one order, and a stage of a searched plan is a contiguous block of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagewright.errors import UserError


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One device of one machine; prints as in a placement."""

    machine: int
    index: int

    def __str__(self) -> str:
        return f"{self.machine}:{self.index}"


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between devices: bytes per second in one direction, and seconds per message."""

    name: str
    bandwidth: float
    latency: float
    staged: bool = False  # copied through host memory: the copy is not hidden behind compute
    reduction: float | None = None  # bytes per second of a ring, if different


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of a machine's devices that reach each other over a link; outer levels hold inner ones."""

    link: Link
    groups: tuple[tuple[int, ...], ...]

    def group_of(self, device: int) -> int | None:
        return next((index for index, group in enumerate(self.groups) if device in group), None)


@dataclass(frozen=True, slots=True)
class Machine:
    """A host and how many devices it has; None on CPUs, where any index is another process."""

    devices: int | None = None
    kind: str = "cpu"  # the catalog's name of its devices
    levels: tuple[Level, ...] = ()
    cores: int | None = None
    host: float | None = None  # bytes per second that all copies through the host get together
    knows_host: bool = True  # whether that was measured or given, not assumed
    parts: tuple[tuple[str, float], ...] = ()  # dollars of what is beside the devices, by part
    watts: float = 0.0  # of the same
    is_shared: bool = False  # its devices are processes on one card, whose speed they divide
    alone: float | None = None  # how much faster such a process is while it is alone; None: by their number

    @property
    def copies_through_host(self) -> bool:
        """Whether some of its devices reach each other only through host memory."""
        return (self.devices or 0) > 1 and any(level.link.staged for level in self.levels)

    @property
    def most_speedup(self) -> float:
        """How much faster one of the processes that share a card is while it is alone, than with all at work."""
        return (self.alone or float(self.devices or 1)) if self.is_shared else 1.0

    def first(self, devices: int) -> Machine:
        """The machine with only its first devices."""
        levels = tuple(
            Level(
                level.link,
                tuple(kept for group in level.groups if (kept := tuple(index for index in group if index < devices))),
            )
            for level in self.levels
        )
        return replace(self, devices=devices, levels=levels)

    def level_of(self, one: int, other: int) -> int | None:
        """The innermost level that connects two devices."""
        for index, level in enumerate(self.levels):
            group = level.group_of(one)
            if group is not None and group == level.group_of(other):
                return index
        return None


Edge = tuple[int, int, int]  # machine, level (-1: a device's own; HOST: of staged copies), group or device
HOST = -2


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines a placement may name, in the order of their numbers."""

    machines: tuple[Machine, ...] = (Machine(),)
    name: str = "this machine"
    network: Link | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device, in the order of the topology."""
        return tuple(
            Device(number, index)
            for number, machine in enumerate(self.machines)
            for index in range(machine.devices or 0)
        )

    def require(self, device: Device, piece: str) -> None:
        """Raise if this cluster has no such device; `piece` is the text that named it."""
        if device.machine >= len(self.machines):
            raise UserError(
                f"placement piece '{piece}' names machine {device.machine} but the cluster has "
                f"{len(self.machines)} (0-{len(self.machines) - 1})"
            )
        limit = self.machines[device.machine].devices
        if limit is not None and device.index >= limit:
            raise UserError(
                f"placement piece '{piece}' names device {device} but machine {device.machine} has {limit} devices "
                f"(0-{limit - 1}); did you mean {device.machine}:{limit - 1}?"
            )

    def first(self, count: int) -> Cluster:
        """The cluster reduced to its first devices."""
        available = len(self.devices)
        if not 1 <= count <= available:
            raise UserError(f"{count} devices were asked for but {self.name} has {available}; ask for 1 to {available}")
        machines: list[Machine] = []
        for machine in self.machines:
            kept = min(count, machine.devices or 0)
            if kept:
                machines.append(machine.first(kept))
            count -= kept
        return Cluster(tuple(machines), self.name, self.network)

    def kind_of(self, device: Device) -> str:
        return self.machines[device.machine].kind

    def link(self, one: Device, other: Device) -> Link:
        """The slowest link on the way between two devices."""
        return min((link for _, link in self.path(one, other)), key=lambda link: link.bandwidth)

    def path(self, source: Device, target: Device) -> list[tuple[tuple[Edge, bool], Link]]:
        """The edges of a message, each with its direction (True: up) and its link; messages share edges."""
        if source.machine != target.machine:
            if self.network is None:
                raise UserError(
                    f"cluster {self.name} has no network between machines {source.machine} and {target.machine}; "
                    'add network = "net-10g" to its file'
                )
            return [*self._climb(source, None, True), *self._climb(target, None, False)]
        machine = self.machines[source.machine]
        level = machine.level_of(source.index, target.index)
        if level is None:
            raise UserError(
                f"cluster {self.name} has no link between devices {source} and {target}; "
                "add a level that holds both to its file"
            )
        edges = [*self._climb(source, level, True), *self._climb(target, level, False)]
        if machine.host is not None and machine.levels[level].link.staged:  # every staged copy crosses the same edge
            shared = Link("host", machine.host, 0.0, staged=True)
            edges.append((((source.machine, HOST, 0), True), shared))
        return edges

    def _climb(self, device: Device, stop: int | None, up: bool) -> list[tuple[tuple[Edge, bool], Link]]:
        """The edges from a device up to a level of its machine, or out of the machine."""
        machine = self.machines[device.machine]
        levels = machine.levels if stop is None else machine.levels[: stop + 1]
        edges: list[tuple[tuple[Edge, bool], Link]] = []
        edge: Edge = (device.machine, -1, device.index)
        for index, level in enumerate(levels):
            edges.append(((edge, up), level.link))
            edge = (device.machine, index, level.group_of(device.index) or 0)
        if stop is None:
            assert self.network is not None
            edges.append((((device.machine, len(machine.levels), 0), up), self.network))
        return edges


ANYWHERE = Cluster((Machine(),) * 1024, "anywhere")  # for placements that need no real machines
