"""`inspect`: the units of a model, how it is cut, which cuts are impossible, and what is proven."""

import json

import pytest
from torch import Tensor, nn

from stagewright.cli.main import main
from stagewright.errors import UserError
from stagewright.run.inspect import inspect_model

TIED = "tests.models:tied"
ALIAS = "tests.models:alias"


class Deciding(nn.Module):
    """Its own code branches on values, so it is cut between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3 * 8 * 8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for block in self.blocks:
            x = block(x) * (1 if x.sum() < 1e9 else 2)
        return self.head(x)


def test_counts_parameters_operations_and_bytes_of_every_unit() -> None:
    found = inspect_model("vgg-small")
    model = inspect_model("vgg-small", stages=1)
    units = {unit.name: unit for unit in found.units}
    assert sum(unit.parameters for unit in found.units) == 8_506_442
    assert units["features.0"].parameters == 32 * 3 * 9 + 32
    assert units["features.0"].flops == 2 * 32 * 3 * 9 * 32 * 32
    assert units["features.0"].bytes_across == 32 * 32 * 32 * 4
    assert found.proof is not None and found.proof.stages == 4 and len(found.cuts) == 3
    assert model.proof is None and model.cuts == () and model.refused is None


def test_names_the_cuts_that_are_impossible_and_why() -> None:
    found = inspect_model(ALIAS, image=8)
    impossible = {unit.name: unit.impossible for unit in found.units}
    assert [name for name, why in impossible.items() if why] == ["relu"] and "share memory" in impossible["relu"]
    most = len(found.units) - 1
    assert found.most_stages == most
    with pytest.raises(UserError, match=f"at most {most} stages"):
        inspect_model(ALIAS, image=8, stages=most + 1)


def test_says_why_a_model_is_cut_between_blocks() -> None:
    found = inspect_model(f"{__name__}:Deciding", image=8)
    assert (found.way, [unit.name for unit in found.units]) == ("blocks", ["blocks.0", "blocks.1", "blocks.2"])
    assert found.why is not None and "reads values" in found.why
    assert found.proof is not None and found.proof.stages == 3


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_prints_one_json_object_or_a_table(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", TIED, "--image", "8", "--cut", "head", *arguments])
    shown = capsys.readouterr().out
    if arguments:
        found = json.loads(shown)
        assert found["cuts"] == ["head"] and found["proof"]["difference"] == 0.0
    else:
        assert "proven: 2 stages" in shown
    main(["inspect", ALIAS, "--image", "8"])
    assert "share memory" in " ".join(capsys.readouterr().out.split())
