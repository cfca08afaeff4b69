"""The search against brute force, and against PipeDream's own formula on its own profiles."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.cluster.catalog import shipped
from stagewright.cluster.specs import DeviceSpec, Software
from stagewright.cluster.topology import Cluster, Level, Link, Machine
from stagewright.plan.cost import GRADIENT_BYTES
from stagewright.plan.estimate import Estimate, Setting, UnitSums
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.plan.search import Search, best_cuts, make_search
from stagewright.plan.search_space import Segments, make_blocks
from stagewright.profile.pipedream import read_pipedream
from stagewright.profile.profile import Table, Unit
from tests.shared import shared_file

MEMORY = 1 << 40


def link(bandwidth: float, latency: float = 1e-5, staged: bool = False) -> Link:
    return Link("made", bandwidth, latency, staged)


def flat(devices: int, made: Link) -> Cluster:
    return Cluster((Machine(devices, "made", (Level(made, (tuple(range(devices)),)),)),))


def machines(count: int, each: int, inner: Link, network: Link) -> Cluster:
    return Cluster((Machine(each, "made", (Level(inner, (tuple(range(each)),)),)),) * count, "made", network)


def paired(devices: int, inner: Link, outer: Link) -> Cluster:
    pairs = tuple(tuple(range(first, min(first + 2, devices))) for first in range(0, devices, 2))
    return Cluster((Machine(devices, "made", (Level(inner, pairs), Level(outer, (tuple(range(devices)),)))),))


def setting(cluster: Cluster, units: list[Unit], memory: float = MEMORY) -> Setting:
    device = DeviceSpec("made", "made", int(memory), 1e9, {"fp32": 1e12}, {})
    software = Software("made", "made", 1.0, context=0, workspace=0)
    return Setting(cluster, lambda kind: device, software, "fp32", lambda kind, n: Table("fp32", n, tuple(units)))


@dataclass(frozen=True)
class Brute:
    """Every partition, one after the other, in plain arithmetic."""

    setting: Setting
    mode: Mode
    count: int

    def best(self) -> float:
        units = len(self.units)
        devices = len(self.setting.cluster.devices)
        fastest = math.inf
        for stages in range(1, min(units, devices) + 1):
            every_size = list(itertools.product(range(1, devices + 1), repeat=stages))
            fitting = [sizes for sizes in every_size if sum(sizes) <= devices]
            for cuts in itertools.combinations(range(1, units), stages - 1):
                for sizes in fitting:
                    fastest = min(fastest, self.seconds((0, *cuts, units), sizes))
        return fastest

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.setting.tables("made", 1).units

    def seconds(self, bounds: tuple[int, ...], sizes: tuple[int, ...]) -> float:
        stages = len(sizes)
        slowest = 0.0
        for stage, size in enumerate(sizes):
            behind = sum(sizes[stage + 1 :])
            if self.bytes(bounds[stage], bounds[stage + 1], size, behind, stages - stage) > self.memory:
                return math.inf
            slowest = max(slowest, self.stage(bounds[stage], bounds[stage + 1], size, behind))
        return slowest

    @property
    def memory(self) -> float:
        return self.setting.devices("made").memory

    @cache  # noqa: B019 - a test ends soon
    def stage(self, first: int, last: int, size: int, behind: int) -> float:
        devices = self.setting.cluster.devices
        end = len(devices) - behind
        block = devices[end - size : end]
        cluster, units = self.setting.cluster, self.units[first:last]
        forward, backward = sum(u.forward for u in units), sum(u.backward for u in units)
        weights = 4 * sum(u.parameters for u in units)
        before = self.units[first - 1] if first else None
        final = self.units[last - 1] if last < len(self.units) else None
        entering = (before.live if before else 0) + (final.live_gradient if final else 0)
        leaving = (final.live if final else 0) + (before.live_gradient if before else 0)
        hops = list(zip(block, [*block[1:], block[0]], strict=True)) if size > 1 else []
        reduction, staged = 0.0, False
        if hops:
            links = [entry[1] for a, b in hops for entry in cluster.path(a, b)]
            bandwidth, latency = min(x.bandwidth for x in links), max(x.latency for x in links)
            staged = any(x.staged for x in links)
            ring = 2 * (size - 1) / size * weights / bandwidth + 2 * (size - 1) * latency
            tree = 2 * weights / bandwidth + 2 * math.ceil(math.log2(size)) * latency
            reduction = min(ring, tree)
        borders = [end - size] * (first > 0) + [end] * (last < len(self.units))  # a stage before it, and one behind
        sharers = max(sum(device.machine == machine for device in block) for machine in range(len(cluster.machines)))
        border = math.inf  # replicas of a machine share its network card
        for at in borders:
            crosses = devices[at - 1].machine != devices[at].machine
            bandwidth = cluster.link(devices[at - 1], devices[at]).bandwidth
            inner = min(link.bandwidth for _, link in cluster.path(devices[at - 1], devices[at]))
            border = min(border, min(inner, cluster.network.bandwidth / sharers) if crosses else bandwidth)
        even = self.mode in (Mode.STALE, Mode.PIPEDREAM)
        own = self.count / size if even else math.ceil(self.count / size)
        rounds = self.count / size if self.mode is Mode.PIPEDREAM else 1
        tail = min(1.0, (25 << 20) / max(weights, 1))
        exposed = max(reduction - (0.0 if staged else backward), reduction * tail)
        if even and last < len(self.units) and not staged:
            exposed = 0.0
        update = weights * 5.0 / 1e9
        busy = own * (forward + backward) + rounds * (exposed + update)
        return max(busy, own * max(entering, leaving) / border + rounds * reduction)

    @cache  # noqa: B019 - a test ends soon
    def bytes(self, first: int, last: int, size: int, behind: int, stages: int) -> float:
        units = self.units[first:last]
        weights = 4 * sum(u.parameters for u in units)
        versions = 1
        if self.mode is Mode.STALE:
            versions = stages
        if self.mode is Mode.PIPEDREAM:
            versions = math.ceil((behind + size) / size)
        copies = 1 + (versions if versions > 1 else 0) + (2 if versions > 1 and size > 1 else 1) + 1
        rounds = size if self.mode is Mode.PIPEDREAM else self.count
        depth = min(math.ceil((behind + size) / size) + stages - 1, versions * math.ceil(rounds / size))
        if stages == 1:
            depth = 1
        live = (self.units[first - 1].live if first else 0) + (units[-1].live if last < len(self.units) else 0)
        return weights * copies + sum(u.saved for u in units) * depth + 2 * live + 2 * max(u.output for u in units)


def chain(draw: st.DrawFn, most: int) -> list[Unit]:
    size = st.integers(0, 1 << 28)
    time = st.floats(1e-4, 1e-1)
    units = []
    for index in range(draw(st.integers(1, most))):
        parameters, output, live, saved = (draw(size) for _ in range(4))
        gradient = draw(st.integers(0, live))
        units.append(Unit(f"u{index}", "made", draw(time), draw(time), parameters, output, live, gradient, saved))
    return units


@st.composite
def cases(draw: st.DrawFn, most_units: int, most_devices: int) -> tuple[Setting, Mode, int]:
    fast, slow = link(draw(st.floats(1e9, 1e11))), link(draw(st.floats(1e8, 1e9)), 1e-4, draw(st.booleans()))
    shape = draw(st.sampled_from(["flat", "machines", "uneven", "pairs"]))
    devices = draw(st.integers(1, most_devices))
    if shape == "flat":
        cluster = flat(devices, draw(st.sampled_from([fast, slow])))
    elif shape == "machines":
        each = draw(st.integers(1, 3))
        cluster = machines(max(1, devices // each), each, fast, slow)
    elif shape == "uneven" and devices > 2:
        sizes = (1, 2, devices - 3) if devices > 4 else (1, devices - 1)
        cluster = Cluster(tuple(machines(1, size, fast, slow).machines[0] for size in sizes), "made", slow)
    else:
        cluster = paired(devices, fast, slow)
    memory = draw(st.sampled_from([MEMORY, 1 << 31, 1 << 32, 1 << 33]))
    mode = draw(st.sampled_from([Mode.STALE, Mode.SYNC, Mode.PIPEDREAM]))
    return setting(cluster, chain(draw, most_units), memory), mode, draw(st.integers(1, 16))


def check_equal(where: Setting, mode: Mode, count: int) -> None:
    brute = Brute(where, mode, count)
    expected = brute.best()
    found = make_search(where, mode, count, count).best()
    if found is None:
        assert expected == math.inf
        return
    assert found.seconds == pytest.approx(expected, rel=1e-8)
    assert brute.seconds(found.bounds, found.sizes) == pytest.approx(expected, rel=1e-8)


@settings(max_examples=30, deadline=None)
@given(cases(6, 5))
def test_search_equals_brute_force_on_short_chains(case: tuple[Setting, Mode, int]) -> None:
    check_equal(*case)


@settings(max_examples=4, deadline=None)
@given(cases(9, 5))
def test_search_equals_brute_force_on_longer_chains(case: tuple[Setting, Mode, int]) -> None:
    check_equal(*case)


@pytest.mark.parametrize("mode", [Mode.STALE, Mode.SYNC, Mode.PIPEDREAM])
@pytest.mark.parametrize("shape", ["flat", "machines", "pairs"])
def test_search_equals_brute_force_with_and_without_memory_limits(shape: str, mode: Mode) -> None:
    draw = np.random.default_rng(sum(map(ord, shape + mode)))
    units = [
        Unit(f"u{i}", "made", *draw.uniform(1e-3, 5e-2, 2), *(int(n) for n in draw.integers(0, 1 << 26, 5)))
        for i in range(10)
    ]
    fast, slow = link(1e10), link(1e9, 1e-4, True)
    cluster = {"flat": flat(6, fast), "machines": machines(2, 3, fast, slow), "pairs": paired(6, fast, slow)}[shape]
    unlimited = make_search(setting(cluster, units), mode, 12, 12).best()
    assert unlimited is not None
    for memory in (MEMORY, 3 << 30, 2 << 30, 1 << 30):
        check_equal(setting(cluster, units, memory), mode, 12)


def test_only_crossed_borders_cost_time() -> None:
    """On two machines of two devices: a first stage has nothing before it, a last one nothing behind."""
    unit = Unit("u", "made", 0.0625, 0.015625, 0, 0, 15_621_001, 0, 0)
    units = [unit, replace(unit, name="last", backward=0.0625, live=0)]
    where = setting(machines(2, 2, link(1e9), link(1e8, 1e-4)), units)
    found = make_search(where, Mode.STALE, 1, 1).best(2)
    assert found is not None and (found.sizes, found.seconds) == ((1, 3), 0.078125)


def test_messages_of_a_stage_cross_its_border_whichever_stage_is_behind() -> None:
    """On three machines of one device, a microbatch leaves the first stage over 100 MB/s, however it is received."""
    unit = Unit("u", "made", 0.01, 0.01, 0, 0, 20_000_000, 0, 0)
    where = setting(machines(3, 1, link(1e9), link(1e8)), [unit, replace(unit, name="last", live=0)])
    found = make_search(where, Mode.STALE, 1, 1).best(2)
    assert found is not None and found.seconds == pytest.approx(0.2)


@settings(max_examples=30, deadline=None)
@given(cases(6, 5), st.integers(2, 4))
def test_finds_the_best_partition_of_a_given_number_of_stages(case: tuple[Setting, Mode, int], stages: int) -> None:
    where, mode, count = case
    brute = Brute(where, mode, count)
    units, devices = len(brute.units), len(where.cluster.devices)
    partitions = [
        ((0, *cuts, units), sizes)
        for cuts in itertools.combinations(range(1, units), stages - 1)
        for sizes in itertools.product(range(1, devices + 1), repeat=stages)
        if sum(sizes) <= devices
    ]
    expected = min((brute.seconds(*partition) for partition in partitions), default=math.inf)
    found = make_search(where, mode, count, count).best(stages)
    assert (found.seconds if found else math.inf) == pytest.approx(expected, rel=1e-8)


@settings(max_examples=30, deadline=None)
@given(cases(6, 5))
def test_found_partitions_fit_as_plans(case: tuple[Setting, Mode, int]) -> None:
    where, mode, count = case
    found = make_search(where, mode, count, count).best()
    if found is None or len(found.sizes) == 1:
        return
    blocks = make_blocks(where.cluster, ["made"])
    cuts = [f"u{bound}" for bound in found.bounds[1:-1]]
    plan = make_plan(found.placement(blocks.devices), batch=count, microbatches=count, mode=mode, cuts=cuts)
    Estimate(plan, where).require_fit()


def pipedream_seconds(sums: UnitSums, segments: Segments, size: np.ndarray, bandwidth: float) -> np.ndarray:
    """PipeDream's own formula on a flat network: seconds per minibatch, sizes of blocks x segments."""
    weights = segments.parameters * GRADIENT_BYTES
    busy = (segments.compute[0] + 4 * (size - 1) * weights / (bandwidth * size)) / size
    entering = 2 * sums.live[segments.first] / (bandwidth * size)
    leaving = np.where(segments.first > 0, 2 * sums.live[segments.last] / (bandwidth * size), 0.0)
    return np.asarray(np.maximum(busy, np.maximum(entering, leaving)))


PUBLISHED = {4: (1.19, 1.74, 2.84), 8: (1.16, 1.72, 2.75), 16: (1.23, 1.84, 2.66)}


@pytest.mark.parametrize("devices", PUBLISHED)
def test_no_pipedream_plan_is_faster_under_its_own_formula(devices: int) -> None:
    profile = read_pipedream(shared_file("profiles/pipedream/vgg16.txt"), "vgg16", 128)
    sums = UnitSums(profile.tables[0])
    segments = Segments.of([sums], shipped().system("pipedream"))
    for bandwidth, speedup in zip((12e9, 3.125e9, 1.25e9), PUBLISHED[devices], strict=True):
        blocks = make_blocks(flat(devices, link(bandwidth)), ["made"])
        seconds = pipedream_seconds(sums, segments, blocks.kinds.size[:, None], bandwidth)
        found = Search(segments, blocks, seconds).best()
        assert found is not None
        parallel = seconds[np.flatnonzero(blocks.kinds.size == devices)[0], segments.beginning(0).stop - 1]
        assert parallel / found.seconds == pytest.approx(speedup, abs=0.006)
        if (devices, bandwidth) == (16, 3.125e9):
            assert found.sizes == (15, 1)


def test_best_cuts_of_a_given_placement() -> None:
    draw = np.random.default_rng(3)
    units = [
        Unit(f"u{i}", "made", *draw.uniform(1e-3, 1e-2, 2), int(draw.integers(0, 1 << 22)), 0, 4096, 4096, 0)
        for i in range(9)
    ]
    where = setting(flat(6, link(1e9)), units)
    devices = where.cluster.devices
    placement = (devices[:3], devices[3:5], devices[5:])
    chosen = best_cuts(where, placement, Mode.STALE, 12, 12)
    brute = Brute(where, Mode.STALE, 12)
    times = {cuts: brute.seconds((0, *cuts, 9), (3, 2, 1)) for cuts in itertools.combinations(range(1, 9), 2)}
    assert times[tuple(int(name[1:]) for name in chosen)] == pytest.approx(min(times.values()))
