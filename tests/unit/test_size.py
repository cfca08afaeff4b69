"""The size of the project is a decision: a commit that raises a ceiling says why in its message."""

from __future__ import annotations

from tests.size import lines_by_folder, long_files, table

# Lines of Python at most. They only fall, unless a commit raises one and says why.
CEILINGS = {
    "api": 1_165,
    "bench": 2_937,
    "cli": 2_881,
    "cluster": 780,
    "config": 1_934,
    "data": 4_487,
    "hardware": 2_775,
    "integrations": 567,
    "model": 5_435,
    "plan": 1_745,
    "planning": 2_688,
    "profile": 1_169,
    "report": 3_364,
    "run": 3_814,
    "runtime": 11_732,
    "schedule": 685,
    "top": 1_377,
    "package": 49_535,
    "package: code": 36_131,
    "benchmarks": 7_250,
    "tests": 44_706,
}
LONGEST = 500  # of one file of the package


def test_no_folder_is_larger_than_its_ceiling() -> None:
    found = lines_by_folder()
    assert all(found[name] <= most for name, most in CEILINGS.items()), f"\n{table(CEILINGS)}"


def test_every_folder_of_the_package_has_a_ceiling() -> None:
    assert set(lines_by_folder()) <= set(CEILINGS)


def test_no_file_of_the_package_is_too_long() -> None:
    assert long_files(LONGEST) == {}
