"""What fits together once data, model and plan are known."""

from __future__ import annotations

from typing import Any

import pytest

from stagewright.config.fits import FITS, Facts, check_fits
from stagewright.config.toml import make_config
from stagewright.errors import UserError
from stagewright.voice import Voice

_PLACED = make_config({"plan": {"placement": "0:0"}, "data": {"source": "folder:a"}})
_SAVING = make_config({"plan": {"placement": "0:0"}, "checkpoint": {"every": 1}})


def test_what_is_not_known_yet_breaks_no_row() -> None:
    assert not [fit for fit in FITS if fit.breaks(Facts(_PLACED))]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"ranks": 2, "world": 3}, "2 ranks but 3 processes"),
        ({"idle": 1}, "machine 1 but placement 0:0"),
        ({"batches": 0}, "0 batches to train"),
        ({"start": 8, "batches": 8}, "at batch 8 and the run ends at 8"),
        ({"start": 7, "batches": 9, "pause_step": 2}, "only every 2 batches"),
        ({"state": "steps", "replicas": 2}, "each of 2 replicas"),
        ({"config": _SAVING, "state": "steps"}, "no checkpoint holds"),
        ({"loss": "binary", "classes": 3}, "up to 2 but --loss binary"),
        ({"outputs": 4, "classes": 5}, "labels up to 4 but the model has 4 outputs"),
        ({"outputs": 4, "has_ignored": True}, "no label that counts"),
        ({"embeddings": 8, "vocabulary": 9}, "tokens up to 8 but .* has 8"),
    ],
)
def test_what_does_not_fit_is_one_line(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_fits(Facts(**{"config": _PLACED, **facts}))


def test_outputs_without_a_class_are_a_warning_about_the_training_data_alone() -> None:
    said: list[str] = []
    for data in ("folder:a", "folder:b"):
        check_fits(Facts(_PLACED, data=data, loss="cross-entropy", classes=3, outputs=10), Voice(said.append))
    assert len(said) == 1 and "--classes 3 would fit" in said[0]
