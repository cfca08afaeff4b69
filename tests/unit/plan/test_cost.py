"""Cost formulas against numbers worked out by hand."""

from __future__ import annotations

import pytest

from stagewright.cluster.catalog import shipped
from stagewright.cluster.specs import Software
from stagewright.cluster.topology import Cluster, Device, Level, Link, Machine
from stagewright.plan import cost


def test_a_ring_moves_each_byte_almost_twice() -> None:
    # 8 ranks, 800 bytes at 100 a second: 14 steps of 100 bytes
    assert cost.allreduce_seconds(800, 8, 100, 0.0) == pytest.approx(14.0)
    assert cost.allreduce_seconds(800, 1, 100, 0.0) == 0.0


def test_a_tree_wins_where_latency_counts() -> None:
    # ring: 2 * 1023 steps of 1 s; tree: 20 steps of 1 s and 2 seconds of bytes
    assert cost.allreduce_seconds(100, 1024, 100, 1.0) == pytest.approx(22.0)


def test_backward_hides_all_but_the_last_bucket() -> None:
    size = 4 * (25 << 20)
    assert cost.exposed_seconds(8.0, 100.0, cost.tail_share(size)) == pytest.approx(2.0)
    assert cost.exposed_seconds(8.0, 1.0, cost.tail_share(size)) == pytest.approx(7.0)
    assert cost.exposed_seconds(8.0, 100.0, cost.tail_share(1 << 20)) == pytest.approx(8.0)


def test_update_seconds_count_passes_over_the_weights() -> None:
    assert cost.update_seconds(1e6, 5, 1e9) == pytest.approx(0.02)


def test_loaded_rate_is_below_loader_and_devices() -> None:
    assert cost.loaded_rate(1000.0, 1e9) == pytest.approx(1000.0)
    assert cost.loaded_rate(1e9, 1000.0) == pytest.approx(1000.0)
    assert cost.loaded_rate(1000.0, 1000.0) == pytest.approx(1000.0 * 2**-0.25)


def made(bandwidth: float) -> Link:
    return Link("made", bandwidth, 1e-6)


def test_a_ring_in_topology_order_crosses_each_bridge_once_each_way() -> None:
    pairs = Level(made(10.0), ((0, 1), (2, 3)))
    cluster = Cluster((Machine(4, "made", (pairs, Level(made(4.0), ((0, 1, 2, 3),)))),))
    in_order = [Device(0, index) for index in (0, 1, 2, 3)]
    across = [Device(0, index) for index in (0, 2, 1, 3)]
    assert cost.ring_fabric(cluster, in_order).bandwidth == 4.0
    assert cost.ring_fabric(cluster, across).bandwidth == 2.0  # each bridge carries two messages each way
    assert cost.ring_fabric(cluster, in_order[:2]).bandwidth == 10.0


def test_a_ring_over_machines_is_as_fast_as_their_network() -> None:
    cluster = shipped().cluster("v100-32")
    assert cost.ring_fabric(cluster, cluster.devices).bandwidth == shipped().links["net-100g"].bandwidth
    inside = cost.ring_fabric(cluster, cluster.devices[:8])
    assert inside.bandwidth == 6 * shipped().links["nvlink2"].bandwidth and not inside.staged


def test_a_tensor_that_is_summed_whole_goes_up_before_it_comes_down() -> None:
    whole, in_parts = (Software("made", "made", 1.0, whole_sums=is_whole) for is_whole in (True, False))
    staged, direct = (cost.Fabric(1.0, 0.0, staged=is_staged) for is_staged in (True, False))
    assert cost.carried_bytes(100, 80, whole, staged) == 180
    assert cost.carried_bytes(100, 80, in_parts, staged) == cost.carried_bytes(100, 80, whole, direct) == 100


def test_copies_through_the_host_hide_nothing() -> None:
    assert cost.hidden_seconds(5.0, cost.Fabric(1.0, 0.0, staged=True)) == 0.0
    assert cost.hidden_seconds(5.0, cost.Fabric(1.0, 0.0, staged=False)) == 5.0
