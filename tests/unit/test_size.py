"""The size of the project is a decision: a commit that raises a ceiling says why in its message."""

from __future__ import annotations

from tests.size import lines_by_folder, long_files, table

# Lines of Python at most. They only fall, unless a commit raises one and says why.
CEILINGS = {
    "api": 1_567,
    "bench": 9_170,
    "cli": 3_526,
    "cluster": 791,
    "config": 1_109,
    "data": 4_752,
    "hardware": 2_424,
    "integrations": 609,
    "model": 5_553,
    "plan": 1_776,
    "planning": 3_472,
    "profile": 1_674,
    "report": 3_570,
    "run": 4_356,
    "runtime": 11_888,
    "schedule": 712,
    "top": 1_250,
    "package": 58_200,
    "package: code": 43_100,
    "benchmarks": 0,
    "tests": 44_800,
}
LONGEST = 800  # of one file of the package


def test_no_folder_is_larger_than_its_ceiling() -> None:
    found = lines_by_folder()
    assert all(found[name] <= most for name, most in CEILINGS.items()), f"\n{table(CEILINGS)}"


def test_every_folder_of_the_package_has_a_ceiling() -> None:
    assert set(lines_by_folder()) <= set(CEILINGS)


def test_no_file_of_the_package_is_too_long() -> None:
    assert long_files(LONGEST) == {}
