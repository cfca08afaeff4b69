"""Imports PipeDream's graph.txt: nodes with forward and backward milliseconds and bytes, then edges."""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from stagewright.errors import UserError
from stagewright.files import read_text
from stagewright.profile.profile import Profile, Table, Unit

_NODE = re.compile(
    r"(?P<id>\S+) -- (?P<text>.*) -- forward_compute_time=(?P<forward>[0-9.eE+-]+), "
    r"backward_compute_time=(?P<backward>[0-9.eE+-]+), activation_size=(?P<activation>[0-9.eE+;\[\] -]+), "
    r"parameter_size=(?P<parameters>[0-9.eE+-]+)(?: -- .*)?"
)
_EDGE = re.compile(r"\s+(?P<source>\S+) -- (?P<target>\S+)")
_MILLISECOND = 1e-3
_ELEMENT = 4


class _Node(NamedTuple):
    text: str
    forward: float
    backward: float
    activation: int
    parameters: int


def read_pipedream(path: str | Path, model: str, samples: int) -> Profile:
    """The profile of a model, at the minibatch size that the file was measured at; its Input node is dropped."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"PipeDream profile {path}: {getattr(error, 'strerror', None) or error}") from error
    nodes, edges = _parse(lines, path)
    order = _topological(nodes, edges, path)
    units = [name for name in order if not nodes[name].text.startswith("Input")]
    if not units:
        raise UserError(f"PipeDream profile {path} has no nodes; a line looks like 'node2 -- ReLU -- forward_...'")
    return Profile(model, "pipedream", "pipedream", (), 1, None, (_table(units, nodes, edges, samples),))


def _parse(lines: list[str], path: str | Path) -> tuple[dict[str, _Node], dict[str, list[str]]]:
    nodes: dict[str, _Node] = {}
    edges: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if (edge := _EDGE.fullmatch(line)) is not None:
            edges[edge["source"]].append(edge["target"])
            continue
        node = _NODE.fullmatch(line)
        if node is None:
            raise UserError(f"PipeDream profile {path}, line {number}: neither a node nor an edge: {line[:60]!r}")
        nodes[node["id"]] = _Node(
            node["text"],
            _number(node["forward"], path, number) * _MILLISECOND,
            _number(node["backward"], path, number) * _MILLISECOND,
            round(sum(_number(part, path, number) for part in node["activation"].strip("[]").split(";"))),
            round(_number(node["parameters"], path, number) / _ELEMENT),
        )
    for source, targets in edges.items():
        for name in (source, *targets):
            if name not in nodes:
                raise UserError(f"PipeDream profile {path}: an edge names '{name}', which has no node")
    return nodes, edges


def _number(text: str, path: str | Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"PipeDream profile {path}, line {line}: '{text[:40]}' is not a number") from None
    if not 0 <= value < 1e18:
        raise UserError(f"PipeDream profile {path}, line {line}: {text[:40]} is out of range")
    return value


def _topological(nodes: dict[str, _Node], edges: dict[str, list[str]], path: str | Path) -> list[str]:
    """An order in which every node comes after its inputs; ties are broken by the number in the name."""

    def key(name: str) -> tuple[int, str]:
        digits = re.sub(r"\D", "", name)
        return (int(digits) if digits else 0, name)

    waiting = dict.fromkeys(nodes, 0)
    for targets in edges.values():
        for target in targets:
            waiting[target] += 1
    ready = [key(name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        name = heapq.heappop(ready)[1]
        order.append(name)
        for target in edges.get(name, ()):
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, key(target))
    if len(order) < len(nodes):
        raise UserError(f"PipeDream profile {path}: its edges form a cycle")
    return order


def _table(units: list[str], nodes: dict[str, _Node], edges: dict[str, list[str]], samples: int) -> Table:
    position = {name: index for index, name in enumerate(units)}
    last_use = {name: max((position[target] for target in edges.get(name, ())), default=-1) for name in units}
    made: list[Unit] = []
    for index, name in enumerate(units):
        node = nodes[name]
        live = sum(nodes[other].activation for other in units[: index + 1] if last_use[other] > index)
        kind, size = node.text.partition("(")[0], node.activation
        made.append(Unit(name, kind, node.forward, node.backward, node.parameters, size, live, live, size))
    return Table("fp32", samples, tuple(made))
