"""Who may import whom: the folders of docs/design.md, section 3, and what keeps `stagewright --help` fast.

Every rule is a function from the package's source to its violations, so that each is tested twice: the package breaks
none, and a line that breaks it is found.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import stagewright
from tests.waiting import LONG

ROOT = Path(stagewright.__file__).parent
Source = Mapping[str, str]  # the text of every file, by its path below the package

TOP_LEVEL = {"__init__", "__main__", "errors", "events", "files", "metrics", "objects", "torch_internals", "voice"}
MOST_FILES = 16  # of one folder
BASICS = {"errors", "events", "files", "metrics", "objects", "voice"}
MODEL = {"model", "model.networks"}
TRAINING = {*BASICS, *MODEL, "torch_internals", "cluster", "config", "data", "plan.plan", "schedule", "runtime"}
RUNTIME = {f"runtime.{folder}" for folder in ("comm", "stage", "checkpoint", "multinode", "process")}
BELOW_RUN = {*TRAINING, *RUNTIME, "runtime.script", "plan", "profile", "planning", "hardware", "report", "report.live"}
BENCH = {*BELOW_RUN, "run", "bench"}
# What each folder may import of ours beside itself: a folder without its subfolders, or a single module.
ALLOWED: dict[str, set[str]] = {
    "__main__": {"cli.main"},
    "errors": set(),
    "events": {"errors", "metrics"},
    "files": set(),
    "metrics": {"errors"},
    "objects": {"errors"},
    "torch_internals": set(),
    "voice": set(),
    "config": {"errors", "voice", "files"},
    "cluster": {"errors", "voice", "files", "metrics"},
    "model": {*BASICS, "torch_internals", "config.losses", "model.networks"},
    "model.networks": {"errors", "files", "objects"},
    "data": {*BASICS, "torch_internals", "config.sources", "data.formats"},
    "data.formats": {*BASICS, "config.sources"},
    "profile": {*BASICS, *MODEL, "torch_internals", "cluster"},
    "plan": {*BASICS, "cluster", "config.modes", "config.optimizers", "profile"},
    "schedule": {"errors", "plan.plan"},
    "planning": {*BASICS, *MODEL, "cluster", "config", "plan", "profile", "schedule"},
    "runtime": TRAINING,
    "runtime.comm": TRAINING,
    "runtime.stage": {*TRAINING, "runtime.comm"},
    "runtime.checkpoint": {*TRAINING, "runtime.comm", "runtime.stage"},
    "runtime.multinode": {*TRAINING, "runtime.comm", "runtime.stage", "runtime.checkpoint"},
    "runtime.process": {*TRAINING, *RUNTIME},
    "runtime.script": {*TRAINING, *RUNTIME, "data.formats"},
    "hardware": {*BASICS, "cluster", "config"},
    "hardware.doctor": {*BELOW_RUN, "run"},
    "report": BASICS,
    "report.live": {*BASICS, "report"},
    "run": {*BELOW_RUN, "run.observe", "data.formats"},
    "run.observe": BELOW_RUN,
    "bench": {*BELOW_RUN, "run", "data.formats.records"},
    "bench.demo": BENCH,
    "api": {*BELOW_RUN, "run", "run.observe", "data.formats"},
    "integrations": {*MODEL, "errors", "api", "run", "runtime.script"},
    "cli.command": {"errors", "config", "run.folder"},
    "cli": {
        *BENCH,
        "cli.command",
        "bench.demo",
        "hardware.doctor",
        "data.formats",
    },
}
# Modules that import less than their folder.
ALONE = {
    "plan.plan": {"cluster", "config.modes", "errors"},
    "profile.profile": {"errors", "events", "files"},
    "run.folder": {"errors", "files"},
}
WITH_TORCH = {
    *("api", "model", "data", "runtime", "run", "bench", "integrations", "torch_internals"),
    *(
        "profile.trace",
        "profile.measure",
        "hardware.devices",
        "hardware.environment",
        "hardware.doctor.measure",
        "hardware.doctor.plain",
        "hardware.doctor.selftest",
    ),
}
WITH_DISTRIBUTED = {"runtime", "bench.demo"}
# These never bring torch with them, not even through what they import.
WITHOUT_TORCH = {
    *BASICS,
    "config",
    "cluster",
    "schedule",
    "report",
    "plan.plan",
    "run.folder",
    "planning.build",
    "planning.question",
    "cli.plan",
    "cli.value",
    "cli.cluster",
    "cli.main",
    "cli.command",
    "cli.parser",
    "cli.runs",
    "cli.schedule",
}
LAZY = {"__init__", "__main__"}  # may import ours inside a function; cli.command imports by name what takes torch


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module or name."""

    name: str  # of ours without the package: plan.plan.Plan
    is_ours: bool
    is_lazy: bool  # inside a function or a class
    is_typing: bool  # under `if TYPE_CHECKING`


@cache
def read_source() -> Source:
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def folder_of(module: str, source: Source) -> str:
    """The folder of a module or of a name in one; a top-level module stands for itself."""
    parts = module.split(".")
    while len(parts) > 1 and f"{'/'.join(parts)}/__init__.py" not in source:
        parts.pop()
    return ".".join(parts)


def within(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


@cache
def imports_of(text: str) -> tuple[Import, ...]:
    return tuple(_imports(ast.parse(text), False, False))


def _imports(tree: ast.AST, is_lazy: bool, is_typing: bool) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            is_ours = name.split(".")[0] == "stagewright"
            yield Import(name.removeprefix("stagewright."), is_ours, is_lazy, is_typing)
        inner = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        yield from _imports(node, inner, is_typing or guarded)


def target(name: str, source: Source) -> str | None:
    """The module of ours that an imported name lies in; none for the package's own names, such as __version__."""
    parts = name.split(".")
    while parts:
        if f"{'/'.join(parts)}.py" in source or f"{'/'.join(parts)}/__init__.py" in source:
            return ".".join(parts)
        parts.pop()
    return None


def ours(path: str, source: Source) -> set[str]:
    return {found for item in imports_of(source[path]) if item.is_ours and (found := target(item.name, source))}


def forbidden_imports(source: Source) -> list[str]:
    """Imports that the tables above do not allow."""
    found = []
    for path in source.keys() - {"__init__.py"}:
        module, folder = module_of(path), folder_of(module_of(path), source)
        allowed = {folder} | ALLOWED[folder] if module not in ALONE else ALONE[module]
        for used in ours(path, source):
            home = folder_of(used, source)
            if home not in allowed and used not in allowed:
                found.append(f"{module} imports {used}")
    return found


def cycles_of_modules(source: Source) -> list[str]:
    paths = source.keys() - {"__init__.py"}  # which imports the API lazily
    return cycle({module_of(path): ours(path, source) for path in paths})


def cycles_of_folders(source: Source) -> list[str]:
    graph: dict[str, set[str]] = {}
    for path in source.keys() - {"__init__.py"}:
        folder = folder_of(module_of(path), source)
        graph.setdefault(folder, set()).update({folder_of(used, source) for used in ours(path, source)} - {folder})
    return cycle(graph)


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def lazy_imports(source: Source) -> list[str]:
    """Imports of ours inside functions, and by name."""
    found = [
        f"{module_of(path)} imports {item.name} inside a function"
        for path, text in source.items()
        for item in imports_of(text)
        if item.is_lazy and item.is_ours and module_of(path) not in LAZY
    ]
    by_name = re.compile(r"import(_module|__)\(\s*f?[\"']stagewright")
    return found + [
        f"{path} imports a module by name"
        for path, text in source.items()
        if by_name.search(text) and path != "cli/command/command.py"
    ]


def private_imports(source: Source) -> list[str]:
    return [
        f"{module_of(path)} imports {item.name}"
        for path, text in source.items()
        for item in imports_of(text)
        if item.is_ours and re.search(r"\._(?!_)", f".{item.name}")
    ]


def torch_elsewhere(source: Source) -> list[str]:
    """Imports of torch outside the folders that may, or of torch.distributed outside those."""
    found = []
    for path, text in source.items():
        module = module_of(path)
        for item in imports_of(text):
            is_distributed = within(item.name, {"torch.distributed"})
            allowed = WITH_DISTRIBUTED if is_distributed else WITH_TORCH
            if not item.is_ours and not item.is_typing and within(item.name, {"torch"}) and not within(module, allowed):
                found.append(f"{module} imports {item.name}")
    return found


def torch_in_the_wake(source: Source) -> list[str]:
    """Modules that should start without torch but import something that imports it."""
    paths = {module_of(path): path for path in source}
    with_torch, graph = set(), {}
    for module, path in paths.items():
        items = [item for item in imports_of(source[path]) if not item.is_lazy and not item.is_typing]
        graph[module] = {found for item in items if item.is_ours and (found := target(item.name, source))}
        if any(within(item.name, {"torch"}) for item in items if not item.is_ours):
            with_torch.add(module)

    def reached(module: str) -> set[str]:
        seen, rest = set(), [module]
        while rest:
            if (now := rest.pop()) not in seen:
                seen.add(now)
                rest += graph[now]
        return seen

    return [
        f"{module} imports torch through {sorted(through)[0]}"
        for module in paths
        if within(module, WITHOUT_TORCH) and (through := reached(module) & with_torch)
    ]


def badly_shaped_folders(source: Source) -> list[str]:
    """Modules beside the five at the top, folders that are too large, and folders that do not say what they hold."""
    found = [f"{path} at the top" for path in source if "/" not in path and path.removesuffix(".py") not in TOP_LEVEL]
    found += [f"{path}: name the subject" for path in source if re.search(r"(^|/)(util|common|helper|misc)", path)]
    for folder in {path.rpartition("/")[0] for path in source} - {""}:
        files = [path for path in source if path.rpartition("/")[0] == folder]
        first = ast.get_docstring(ast.parse(source.get(f"{folder}/__init__.py", "")))
        if len(files) > MOST_FILES:
            found.append(f"{folder} has {len(files)} files")
        if first is None or len(first) < 40:
            found.append(f"{folder} has no __init__ that says what is inside")
        if folder.replace("/", ".") not in ALLOWED:
            found.append(f"{folder} is in no table of what it may import")
    return found


def modules_without_main(source: Source) -> list[str]:
    """Modules that a subprocess runs with -m, but that do nothing then."""
    started = {name for text in source.values() for name in re.findall(r'"-m",\s*"stagewright\.?([\w.]*)"', text)}
    assert {"", "runtime.process.rank"} <= started
    paths = {name: f"{name.replace('.', '/')}.py" if name else "__main__.py" for name in started}
    return [name for name, path in paths.items() if 'if __name__ == "__main__":' not in source.get(path, "")]


def private_names_of_others(tree: ast.AST) -> Iterator[str]:
    """Private names of our modules and objects that a test uses: imported, as attributes, or patched by name."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("stagewright"):
                yield from (alias.name for alias in names if is_private(alias.name))
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if is_private(name):
                if owner not in ("self", "cls", "os", "sys", "torch"):
                    yield f"{owner}.{name}"
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr"), args=[_, ast.Constant(value=str(name)), *_]):
                if is_private(name):
                    yield name
            case ast.Constant(value=str(text)) if re.fullmatch(r"stagewright(\.\w+)+", text):
                yield from filter(is_private, text.split("."))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


RULES = (
    *(forbidden_imports, cycles_of_modules, cycles_of_folders, lazy_imports, private_imports),
    *(torch_elsewhere, torch_in_the_wake, modules_without_main, badly_shaped_folders),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_every_rule(rule: Callable[[Source], list[str]]) -> None:
    assert rule(read_source()) == []


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_every_folder_of_the_table_exists(folder: str) -> None:
    path = folder.replace(".", "/")
    assert {f"{path}.py", f"{path}/__init__.py"} & read_source().keys()


@pytest.mark.parametrize(
    ("rule", "path", "line"),
    [
        (forbidden_imports, "metrics.py", "import stagewright.events"),
        (forbidden_imports, "report/page.py", "from stagewright.run.folder import is_run"),
        (forbidden_imports, "plan/cost.py", "from stagewright.planning import build"),
        (forbidden_imports, "plan/plan.py", "from stagewright.plan.cost import x"),
        (forbidden_imports, "runtime/comm/device.py", "from stagewright.runtime.stage.worker import Worker"),
        (forbidden_imports, "runtime/stage/worker.py", "from stagewright.plan.estimate import Estimate"),
        (forbidden_imports, "schedule/check.py", "def f():\n    from stagewright.plan import search"),
        (forbidden_imports, "bench/run.py", "from stagewright.bench.demo import run"),
        (forbidden_imports, "run/train.py", "if TYPE_CHECKING:\n    import stagewright.cli.main"),
        (cycles_of_modules, "cluster/topology.py", "from stagewright.cluster.catalog import open_cluster"),
        (cycles_of_folders, "plan/make.py", "from stagewright.schedule.check import check"),
        (lazy_imports, "cli/plan.py", "def f():\n    from stagewright.run import train"),
        (lazy_imports, "cli/plan.py", "import_module('stagewright.run.train')"),
        (private_imports, "cli/checkpoint.py", "from stagewright.cli.parser import _PLACE"),
        (torch_elsewhere, "cli/train.py", "import torch"),
        (torch_elsewhere, "plan/cost.py", "from torch import Tensor"),
        (torch_elsewhere, "run/train.py", "import torch.distributed as dist"),
        (torch_in_the_wake, "cli/main.py", "from stagewright.run.train import run"),
        (modules_without_main, "run/train.py", 'command = [sys.executable, "-m", "stagewright.run.export"]'),
        (badly_shaped_folders, "planner.py", '"""A module at the top."""'),
        (badly_shaped_folders, "data/utils.py", '"""No subject."""'),
        (badly_shaped_folders, "solver/milp.py", '"""A folder without __init__, in no table."""'),
    ],
)  # fmt: skip
def test_every_rule_finds_what_breaks_it(rule: Callable[[Source], list[str]], path: str, line: str) -> None:
    source = read_source()
    assert rule({**source, path: f"{source.get(path, '')}\n{line}\n"})


def test_a_folder_with_too_many_files_is_found() -> None:
    assert badly_shaped_folders(read_source() | {f"plan/part{number}.py": "" for number in range(MOST_FILES)})


TESTS = Path(__file__).parents[1]
ATTACKS = {TESTS / "unit/model/test_prove.py"}  # puts faults into private parts
READERS = sorted(set(TESTS.rglob("*.py")) - ATTACKS)


@pytest.mark.parametrize("path", READERS, ids=lambda path: str(path.relative_to(TESTS)))
def test_tests_use_public_names(path: Path) -> None:
    assert list(private_names_of_others(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "line",
    [
        "from stagewright.run.train import _execute",
        "worker._loss",
        "monkeypatch.setattr(saver, '_write', None)",
        "monkeypatch.setattr('stagewright.run.train._execute', None)",
    ],
)
def test_private_names_are_found(line: str) -> None:
    assert list(private_names_of_others(ast.parse(line)))


HELP = """
import contextlib, io, json, re, sys
from stagewright.cli.main import main

def visit(*command):
    text = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
        main([*command, "--help"])
    loaded[" ".join(command)] = [name for name in ("torch", "numpy", "pydantic", "rich") if name in sys.modules]
    for name in re.findall(r"^    ([a-z]+)", text.getvalue(), re.MULTILINE):
        visit(*command, name)

loaded = {}
visit()
print(json.dumps(loaded))
"""


def test_help_of_every_command_imports_nothing_large() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=LONG, check=True)
    loaded = json.loads(done.stdout)
    assert {"", "train", "bench", "demo", "checkpoint verify", "data inspect", "cluster import"} <= loaded.keys()
    assert {command: names for command, names in loaded.items() if names} == {}


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "stagewright", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=True)
    assert done.stdout == f"stagewright {stagewright.__version__}\n"


def test_a_plan_of_a_known_model_on_a_known_cluster_takes_no_torch() -> None:
    text = """
import sys
from stagewright.cli.main import main
main(["plan", "gpt-micro", "--cluster", "rtx-3090-2", "--mode", "pipedream", "--json"])
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=LONG).returncode == 0
