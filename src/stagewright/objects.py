"""Objects by name: those that a module has, as `package.module:name`, and those that a script gives.

What a script gives as an object (a model, a data set, a loss, an optimizer) is put here and has a name from then on,
such as `stagewright.objects:Net`: it is found as any other name is, by importing this module. So a run of objects takes
the same road as a run of names. The names hold in one process; whoever starts another carries the objects there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stagewright.errors import UserError, first_line

MODULE = f"{__name__}:"  # how the name of such an object begins
_given: dict[str, Any] = {}


def put(what: Any, name: str = "") -> str:
    """Keep an object in this process; returns the name by which `load_object` finds it."""
    known = name or getattr(what, "__qualname__", None) or type(what).__qualname__
    known = unique = "".join(c if c.isidentifier() or c.isdecimal() else "_" for c in known.rpartition(".")[2])
    number = 1
    while unique in _given and _given[unique] is not what:
        number += 1
        unique = f"{known}_{number}"
    _given[unique] = what
    return f"{MODULE}{unique}"


def importable_name(what: Any) -> str | None:
    """The name by which other processes import a function or a class; None for one of `__main__`, or within another."""
    module, name = getattr(what, "__module__", None), getattr(what, "__qualname__", None)
    found = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    if getattr(found, "__spec__", None) is None or not isinstance(name, str) or getattr(found, name, None) is not what:
        return None
    return f"{module}:{name}"


def is_given(name: str) -> bool:
    """Whether a name is of an object that a script gave, in this process or in another."""
    return name.removeprefix("python:").startswith(MODULE)


def shown(name: str) -> str:
    """The name of an object as its script knows it: without the place where it is kept."""
    return name.removeprefix(MODULE)


def given() -> Mapping[str, Any]:
    """The objects that were put here, by the last part of their names."""
    return dict(_given)


def install(objects: Mapping[str, Any]) -> None:
    """Keep the objects of another process under the names that they have there."""
    _given.update(objects)


def remove(*names: str) -> None:
    """Forget objects."""
    for name in names:
        _given.pop(name.partition(":")[2], None)


def load_object(name: str, what: str) -> Any:
    """The object that `package.module:name` names; `what` it is for, in errors."""
    module_name, _, attribute = name.partition(":")
    if module_name == __name__:
        if attribute in _given:
            return _given[attribute]
        raise UserError(
            f"{what} '{attribute}' was given as an object by a script, which alone has it; run that script again "
            "(to resume: with resume=RUN)"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, for a user's file in the current folder
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{what} '{name}': can't import {module_name} ({error}); is it on PYTHONPATH?") from error
    except (Exception, SystemExit) as error:  # the user's code
        raise UserError(
            f"{what} '{name}': importing {module_name} raised {type(error).__name__}: {first_line(error)}"
        ) from error
    if not hasattr(module, attribute):
        raise UserError(f"{what} '{name}': {module_name} has no '{attribute}'")
    return getattr(module, attribute)


def load_callable(name: str, what: str) -> Callable[..., Any]:
    """The function or class that `package.module:name` names."""
    found = load_object(name, what)
    if not callable(found):
        raise UserError(f"{what} '{name}' is of type {type(found).__name__}, which can't be called; name a function")
    result: Callable[..., Any] = found
    return result
