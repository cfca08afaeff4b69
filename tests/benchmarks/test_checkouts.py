"""A checkout beside another one: what is drawn, and that other bits are told from equal ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import checkouts
from stagewright.errors import UserError
from stagewright.voice import SILENT

TOKENS = Path("tokens.bin")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ten_plans_of_every_mode_and_model_are_the_same_for_a_seed(device: str) -> None:
    drawn = list(checkouts.draw(3, device, TOKENS))
    assert len(drawn) == 10 and drawn == list(checkouts.draw(3, device, TOKENS)) != list(
        checkouts.draw(4, device, TOKENS)
    )
    for word in (*checkouts.PLACEMENTS, *checkouts.MODELS):
        assert any(f" {word} " in options for options in drawn), word


def test_other_bits_differ_and_a_run_without_a_checkpoint_is_not_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(checkout: Path, words: str) -> None:
        runs = Path(words.split("--runs ")[1].split()[0])
        runs.mkdir()
        number = int(runs.name.partition("-")[0])
        moved = 1e-7 if number == 1 and checkout == tmp_path else 0.0
        if number != 2:
            save_file({"weight": torch.ones(3) + moved}, runs / "stage-0.master.safetensors")

    monkeypatch.setattr(checkouts, "run_in", run)
    found = list(checkouts.compare_bits(tmp_path, 1, "cpu", SILENT))
    assert [drawn.is_equal for drawn in found] == [True, False, False, *[True] * 7]


def test_a_folder_that_is_no_checkout_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no src/stagewright"):
        checkouts.measure(tmp_path, 1, "--help", SILENT)
