"""Placement text: what it means, how it prints, and what it says when it is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.cluster.placement import Placement, format_devices, format_placement, parse_placement
from stagewright.cluster.topology import Cluster, Device, Machine

ONE = Cluster((Machine(8),))
TWO = Cluster((Machine(8), Machine(8)))


def devices(machine: int, *indices: int) -> tuple[Device, ...]:
    return tuple(Device(machine, index) for index in indices)


# --- What it means ---------------------------------------------------------------------------------------------------


def test_seven_devices_for_the_first_stage_and_one_for_the_second() -> None:
    assert parse_placement("0:0-6.0:7", ONE) == (devices(0, *range(7)), devices(0, 7))


def test_both_stages_on_the_same_sixteen_devices() -> None:
    both = devices(0, *range(8)) + devices(1, *range(8))
    assert parse_placement("0:0-7,1:0-7.0:0-7,1:0-7", TWO) == (both, both)


def test_a_bare_number_continues_the_machine_before_it() -> None:
    assert parse_placement("0:0,2,4-6", ONE) == (devices(0, 0, 2, 4, 5, 6),)
    assert parse_placement("1:3,5,0:1,2", TWO) == (devices(1, 3, 5) + devices(0, 1, 2),)


def test_the_order_of_devices_is_the_order_of_replicas() -> None:
    assert parse_placement("0:3,1,2", ONE) == (devices(0, 3, 1, 2),)


def test_spaces_around_pieces_are_ignored() -> None:
    assert parse_placement(" 0:0-1 , 3 . 0:4 ", ONE) == parse_placement("0:0-1,3.0:4", ONE)


def test_on_cpu_any_index_is_a_process() -> None:
    assert parse_placement("0:0.0:1000") == (devices(0, 0), devices(0, 1000))


@pytest.mark.timeout(300)
def test_reads_the_largest_range_quickly() -> None:
    assert len(parse_placement("0:0-65535")[0]) == 65536


# --- How it prints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0:0-6.0:7", "0:0-7,1:0-7.0:0-7,1:0-7", "0:0,2,4-6", "0:3,2,1", "1:0,0:0,1:1"])
def test_shortest_texts_print_as_themselves(text: str) -> None:
    assert format_placement(parse_placement(text, TWO)) == text


def test_neighbours_join_into_ranges_within_a_machine_only() -> None:
    assert format_placement(parse_placement("0:0,0:1,0:2,1:3,1:4", TWO)) == "0:0-2,1:3-4"
    assert format_devices(devices(0, 7) + devices(1, 8)) == "0:7,1:8"


stages = st.lists(st.builds(Device, st.integers(0, 3), st.integers(0, 12)), min_size=1, unique=True).map(tuple)


@settings(derandomize=True, deadline=None)
@given(st.lists(stages, min_size=1, max_size=5).map(tuple))
def test_any_placement_reads_back_as_itself(placement: Placement) -> None:
    assert parse_placement(format_placement(placement), Cluster((Machine(),) * 4)) == placement


# --- What it says when it is wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:0.x", "placement piece 'x' of '0:0.x' is not machine:device or machine:first-last"),
        ("0:0-", "placement piece '0:0-' of '0:0-' is not machine:device or machine:first-last"),
        ("0:1-2-3", "placement piece '0:1-2-3' of '0:1-2-3' is not machine:device or machine:first-last"),
        ("0:-1", "placement piece '0:-1' of '0:-1' is not machine:device or machine:first-last"),
        ("0:0,,1", "placement piece '' of '0:0,,1' is not machine:device or machine:first-last"),
        ("", "placement '' leaves stage 0 empty"),
        ("0:0..0:1", "placement '0:0..0:1' leaves stage 1 empty"),
        ("0:0.0:1. ", "placement '0:0.0:1. ' leaves stage 2 empty"),
        ("0:0.0:1-3,2", "placement piece '2' puts device 0:2 into stage 1 a second time"),
        ("0:0.0:2,0-7", "placement piece '0-7' puts device 0:2 into stage 1 a second time"),
        ("0:0.1:0", "placement piece '1:0' names machine 1 but the cluster has 1 (0-0)"),
        ("0:0.0:8", "names device 0:8 but machine 0 has 8 devices (0-7); did you mean 0:7?"),
        ("0:4-9", "placement piece '0:4-9' names device 0:9 but machine 0 has 8 devices (0-7); did you mean 0:7?"),
        ("0:6-0", "placement piece '0:6-0' counts down from 6 to 0; write 0-6"),
        ("3-5", "placement piece '3-5' names no machine; write 0:3-5"),
        ("0:0.1", "placement piece '1' names no machine; write 0:1"),
        ("0:0-65536", "placement piece '0:0-65536' names 65537 devices; the limit is 65536"),
    ],
)
def test_errors_name_the_piece(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_placement(text, ONE)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 5000 + ":0", "0:" + "9" * 5000, "0:0-" + "9" * 5000, "." * 5000])
def test_a_long_text_is_quoted_in_part(text: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_placement(text)
    assert len(str(error.value)) < 300


nearly_placements = st.text(alphabet="01279:,.- \n", max_size=30) | st.from_regex(r"(\d{1,40}[:,.-]){1,6}\d{1,5000}")


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.text() | nearly_placements)
def test_any_text_is_a_placement_or_one_line_of_error(text: str) -> None:
    try:
        placement = parse_placement(text, TWO)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1  # the command line prints it as it is
    else:
        assert parse_placement(format_placement(placement), TWO) == placement
