"""The example of docs/models.md that needs transformers works as it is written."""

import os
import sys
from pathlib import Path

import pytest

from stagewright.cli.main import main
from stagewright.model.networks.libraries import import_library, is_installed
from tests.docs import ROOT, Block, blocks, commands

EXAMPLE = "texts"


def of_example() -> list[Block]:
    """The factory, what makes the data, and the commands."""
    found = blocks(ROOT / "docs" / "models.md")
    first = next(number for number, block in enumerate(found) if block.reason == f"{EXAMPLE}.py")
    return found[first : first + 3]


def test_the_example_is_a_factory_its_data_and_commands() -> None:
    factory, data, shell = of_example()
    assert (factory.kind, data.language, data.kind) == ("file", "python", "run")
    assert all(EXAMPLE in " ".join(words) for words, _ in commands(shell)) and "stagewright train" in shell.text


@pytest.mark.skipif("STAGEWRIGHT_NIGHTLY" not in os.environ, reason="takes long: make nightly")
@pytest.mark.skipif(not is_installed("transformers"), reason="transformers is not installed")
def test_a_model_of_transformers_is_inspected_and_trained_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_library("transformers")  # also where torchvision's operators can't be loaded
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    factory, data, shell = of_example()
    Path(factory.reason).write_text(factory.text)
    exec(compile(data.text, str(data), "exec"), {"__name__": "__main__"})
    try:
        for words, _ in commands(shell):
            main(words[1:])
            assert "proven: " in capsys.readouterr().out
    finally:
        sys.modules.pop(EXAMPLE, None)
    assert (tmp_path / "bert.safetensors").exists()
