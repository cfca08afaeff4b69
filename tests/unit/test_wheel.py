"""The wheel: it has every file of the package, and runs in a fresh environment without the source tree.

The environment borrows the libraries of the one that runs the tests through a .pth file, which adds their folder and
nothing that is installed there in editable form; so no test downloads anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import stagewright
from stagewright.hardware.versions import TESTED
from tests.waiting import LONG

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "stagewright"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    _run(ROOT, sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with nothing but the wheel and borrowed libraries."""
    folder = tmp_path_factory.mktemp("fresh")
    _run(folder, sys.executable, "-m", "venv", "--without-pip", "env")
    python = folder / "env" / "bin" / "python"
    _run(folder, sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python.parent


def _run(folder: Path, *command: str) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if not name.startswith(f"stagewright-{stagewright.__version__}.")}
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert packed == {str(path.relative_to(SOURCE.parent)) for path in files}
    assert {"stagewright/py.typed", "stagewright/cluster/devices.toml", "stagewright/report/assets/page.css"} <= packed


def test_the_wheel_trains_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    where = _run(tmp_path, str(installed / "python"), "-c", "import stagewright; print(stagewright.__file__)")
    assert Path(where).is_relative_to(installed.parent)
    assert _run(tmp_path, str(installed / "stagewright"), "--version") == f"stagewright {stagewright.__version__}\n"
    train = ["train", "--model", "resnet8", "--image", "8", "--placement", "0:0", "--mode", "dp", "--emulate"]
    printed = _run(tmp_path, str(installed / "stagewright"), *train, "--batch", "4", "--samples", "8", "--steps", "2")
    assert "done: 2 steps" in printed
    assert [folder.parent.name for folder in tmp_path.glob("runs/*/report.html")]


@pytest.mark.skipif("STAGEWRIGHT_NIGHTLY" not in os.environ, reason="takes long: make nightly")
def test_the_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    printed = _run(tmp_path, str(installed / "stagewright"), "demo")
    assert "stock DDP" in printed and "1+1 stages, sync" in printed
    assert list(tmp_path.rglob("*.html"))


def test_the_project_file_allows_what_was_tested_and_anything_newer() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newest = TESTED["Python"]
    assert project["requires-python"] == f">={oldest}"
    assert f"torch>={TESTED['torch'][0]}" in project["dependencies"]
    minors = range(int(oldest.split(".")[1]), int(newest.split(".")[1]) + 1)
    listed = {text for text in project["classifiers"] if text.startswith("Programming Language :: Python :: 3.")}
    assert listed == {f"Programming Language :: Python :: 3.{minor}" for minor in minors}
    assert project["version"] == stagewright.__version__


def test_the_image_has_the_torch_of_the_tests() -> None:
    (pinned,) = re.findall(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())
    assert f"ARG TORCH={pinned}\n" in (ROOT / "Dockerfile").read_text()
