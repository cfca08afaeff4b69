"""Objects by name: of modules, and of scripts."""

from typing import Any

import pytest

from stagewright import objects
from stagewright.errors import UserError


def test_an_object_is_found_by_the_name_it_was_given() -> None:
    one, two = object(), object()
    names = [objects.put(one, "thing"), objects.put(two, "thing"), objects.put(one, "thing")]
    assert names[0] == names[2] != names[1]
    assert objects.load_object(names[0], "model") is one and objects.load_object(names[1], "model") is two
    assert all(map(objects.is_given, names)) and not objects.is_given("thing:thing")
    objects.remove(*names)
    with pytest.raises(UserError, match="run that script again"):
        objects.load_object(names[0], "model")


def test_names_of_lambdas_and_nested_classes_are_identifiers() -> None:
    assert objects.put(lambda: None) == "stagewright.objects:_lambda_"
    objects.remove("stagewright.objects:_lambda_")


def test_installed_objects_keep_their_names() -> None:
    objects.install({"net_9": len})
    assert objects.load_callable("stagewright.objects:net_9", "model") is len
    assert objects.given()["net_9"] is len
    objects.remove("stagewright.objects:net_9")


def test_what_can_not_be_called_is_named_by_its_type() -> None:
    with pytest.raises(UserError, match="of type float"):
        objects.load_callable("math:pi", "--loss")
    with pytest.raises(UserError, match="math has no 'tau_'"):
        objects.load_object("math:tau_", "--loss")


def test_functions_and_classes_of_modules_are_importable_and_others_are_not() -> None:
    def inside() -> None:
        pass

    assert objects.importable_name(objects.put) == "stagewright.objects:put"
    assert objects.importable_name(UserError) == "stagewright.errors:UserError"
    for other in (inside, lambda: None, UserError("x"), UserError.__init__, 3):
        assert objects.importable_name(other) is None
    script: dict[str, Any] = {"__name__": "__main__"}
    exec("def make(): pass", script)
    assert objects.importable_name(script["make"]) is None
