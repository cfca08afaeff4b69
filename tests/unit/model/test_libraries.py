"""Models of timm and torchvision by name: what is taken from the package, and what is refused."""

import subprocess
import sys
from importlib import util
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.errors import UserError
from stagewright.model.load import build_model, find_entry
from stagewright.model.networks import libraries
from stagewright.model.networks.libraries import Package, built, import_library, is_installed, package_of
from stagewright.planning.traced import form_of, meta_model
from tests.marks import nightly
from tests.waiting import LONG

needs_timm = pytest.mark.skipif(not is_installed("timm"), reason="timm is not installed")
needs_torchvision = pytest.mark.skipif(not is_installed("torchvision"), reason="torchvision is not installed")
IMAGENET = "123.675,116.28,103.53/58.395,57.120000000000005,57.375"


def test_a_missing_library_is_named_with_what_installs_it() -> None:
    assert not is_installed("no_such_library") and is_installed("torch") and is_installed("")
    with pytest.raises(UserError, match=r"no_such_library .*pip install no_such_library.*stagewright\[libraries\]"):
        import_library("no_such_library.models")


@pytest.mark.parametrize(
    ("name", "package"), [("timm:a", "timm"), ("torchvision:a", "torchvision"), ("hf:a", "transformers")]
)
def test_a_model_of_a_missing_package_is_one_line(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = util.find_spec
    monkeypatch.setattr(libraries, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(UserError, match=f"{package} is not installed; install it with pip install {package}"):
        build_model(name, 0)


def test_names_of_packages_are_known_by_the_word_in_front() -> None:
    found = [package_of(name) for name in ("timm:resnet18", "hf:bert", "timm", "timm.models:resnet18", "nets:timm")]
    assert found == [Package.TIMM, Package.TRANSFORMERS, None, None, None]


@nightly
def test_timm_imports_torchvision_in_a_new_process() -> None:
    if not is_installed("timm"):
        pytest.skip("timm is not installed")
    script = (
        "from stagewright.model.networks.libraries import import_library; print(import_library('timm.models').__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG)
    assert done.stdout.split() == ["timm.models"], done.stderr


@needs_timm
def test_timm_tells_size_classes_and_normalization_without_weights() -> None:
    entry = find_entry("timm:test_vit")
    assert entry is not None
    assert (entry.image, entry.channels, entry.classes, entry.tokens) == (160, 3, 1000, None)
    assert entry.normalize == "127.5,127.5,127.5/127.5,127.5,127.5"
    tagged = find_entry("timm:resnet18.a1_in1k")
    assert tagged is not None and (tagged.image, tagged.normalize) == (224, IMAGENET)
    assert form_of("timm:test_vit").shapes == ((3, 160, 160),)


@needs_timm
def test_a_timm_model_is_built_for_classes_and_images() -> None:
    model = build_model("timm:test_vit", 0, 7, image=64)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    assert torch.equal(build_model("timm:test_resnet", 3, 4).fc.weight, build_model("timm:test_resnet", 3, 4).fc.weight)


@needs_torchvision
def test_torchvision_tells_size_classes_and_normalization_without_weights() -> None:
    sides = {"resnet18": 224, "efficientnet_b1": 240, "inception_v3": 299, "fcn_resnet50": 224}
    found: dict[str, Any] = {name: find_entry(f"torchvision:{name}") for name in sides}
    assert {name: entry.image for name, entry in found.items()} == sides
    assert [entry.classes for entry in found.values()] == [1000, 1000, 1000, 21]
    assert {entry.normalize for entry in found.values()} == {IMAGENET}


@needs_torchvision
def test_a_torchvision_model_is_built_for_classes_and_images() -> None:
    model = build_model("torchvision:squeezenet1_1", 0, 7)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    on_meta = meta_model("torchvision:vit_b_16", 5, 64)
    assert on_meta.get_parameter("encoder.pos_embedding").shape[1] == (64 // 16) ** 2 + 1
    assert on_meta.get_parameter("heads.head.weight").shape[0] == 5 and on_meta.get_parameter("class_token").is_meta


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        pytest.param("timm:test_vitt", ["timm ", "'test_vitt'", "did you mean 'test_vit"], marks=needs_timm),
        pytest.param("timm:resnet18.a1", ["'a1'", "did you mean 'resnet18."], marks=needs_timm),
        pytest.param("timm:hf-hub:timm/resnet18", ["no model 'hf-hub:timm/resnet18'"], marks=needs_timm),
        pytest.param("torchvision:resnet81", ["'resnet81'", "did you mean 'resnet18'"], marks=needs_torchvision),
        pytest.param("torchvision:raft_small", ["neither images nor pixels"], marks=needs_torchvision),
    ],
)
def test_what_a_package_does_not_have_is_one_line(name: str, pieces: list[str]) -> None:
    with pytest.raises(UserError) as error:
        build_model(name, 0)
    assert all(piece in str(error.value) for piece in pieces) and "\n" not in str(error.value)


def test_an_error_of_the_package_is_one_line() -> None:
    def build() -> nn.Module:
        raise ValueError("of its own\nin two lines")

    with pytest.raises(UserError, match=r"'timm:a': its package raised ValueError: of its own$"):
        built("timm:a", build)


def test_running_out_of_memory_stays_what_it_is() -> None:
    def build() -> nn.Module:
        raise RuntimeError("can't allocate memory: you tried to allocate 10 bytes")

    with pytest.raises(RuntimeError, match="allocate memory"):
        built("timm:a", build)
