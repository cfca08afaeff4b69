"""The phrases that error messages share."""

from __future__ import annotations

from stagewright.errors import Interrupted, counted, did_you_mean, first_line


def test_first_line_is_the_first_line_or_the_type() -> None:
    assert first_line(ValueError("\nwhy\nmore")) == "why"
    assert first_line(ValueError("abcdef"), 3) == "abc"
    assert first_line(MemoryError()) == "MemoryError"


def test_did_you_mean_names_the_nearest_or_the_known_names() -> None:
    assert did_you_mean("Bacth", ["batch", "steps"]) == "did you mean 'batch'?"
    assert did_you_mean("modle", ["mode", "model", "nodes"]) == "did you mean 'model'?"
    assert did_you_mean("zzz", ["batch", "steps"]) == "known: batch, steps"
    many = did_you_mean("zzz", [f"name{number}" for number in range(100)])
    assert "name0" in many and "name99" not in many and "100 names" in many


def test_numbers_agree_with_their_nouns() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert counted(2, "batch", "es") == "2 batches"


def test_an_interrupt_says_when_and_what_to_do_next() -> None:
    assert str(Interrupted("after step 3")) == "after step 3; nothing is left running"
    assert str(Interrupted("after step 3", "resume it")).endswith("running; resume it")
