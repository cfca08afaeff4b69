"""Where exported weights can be written."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagewright
from stagewright.run.export import require_target
from tests.unit.api.test_training import make_net


@pytest.mark.parametrize("place", ["folder", "file/w.safetensors", "/dev/null"])
def test_refuses_an_unwritable_export_before_training(place: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="weights can't be written to"):
        stagewright.train(make_net, image=8, samples=16, batch=16, steps=1, emulate=True, runs=str(tmp_path / "runs"),
                         export=str(tmp_path / place))  # fmt: skip
    assert not (tmp_path / "runs").exists()
    require_target(tmp_path / "new" / "w.safetensors")
    require_target(tmp_path / "file")
