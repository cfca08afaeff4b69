"""What is recorded of a forward: its graph, what a graph can't hold, and why a model has none."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from stagewright.torch_internals import TreeSpec, tree_leaves

READS, PREPARES = "reads values", "prepares itself"  # in what is said of a module that stays whole


class Untraceable(Exception):
    """The code of the model itself does what a graph can't hold, so only the whole model can run."""

    def __init__(self, why: str, draws: frozenset[str] = frozenset(("random", "numpy"))) -> None:
        super().__init__(why)
        self.draws = draws  # the generators, beside torch's, that the forward may draw from

    @property
    def reads_values(self) -> bool:
        """Whether the model's own code reads values of tensors."""
        return READS in str(self)

    @property
    def is_preparing(self) -> bool:
        """Whether the model's own code only prepared what later forwards use."""
        return PREPARES in str(self)


@dataclass(frozen=True, slots=True)
class Context:
    """Whether gradients are recorded, and the type that autocast computes in: None where it is off."""

    grad: bool
    autocast: tuple[str, torch.dtype] | None

    @staticmethod
    def now(device: str) -> Context:
        is_on = torch.is_autocast_enabled(device)
        return Context(torch.is_grad_enabled(), (device, torch.get_autocast_dtype(device)) if is_on else None)


@dataclass(frozen=True, slots=True)
class Assign:
    """A buffer that the forward replaces: the module that holds it, its name there, and the node of its new value."""

    module: str
    name: str
    value: fx.Node

    @property
    def path(self) -> str:
        """The buffer's name in the whole model."""
        return f"{self.module}.{self.name}".lstrip(".")


@dataclass(slots=True)
class Recording:
    """A forward as a graph.

    Every node's `meta` has its `context`, if it is not that of the whole forward; `follows` where it belongs to the
    node before it; `opens`, the modules whose call begins with it; `memory` and `writes`, the memory of its result and
    that it changes.
    """

    graph: fx.Graph
    returned: TreeSpec | None = None  # how the results become what the model returns
    constants: dict[str, Tensor] = field(default_factory=dict)  # tensors that are neither parameters nor buffers
    assigned: list[Assign] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)  # modules kept whole, and why
    draws: frozenset[str] = frozenset()  # Python's `random`, `numpy`: from which the forward draws numbers

    @property
    def output(self) -> fx.Node:
        """The node that returns."""
        found: list[fx.Node] = [node for node in self.graph.nodes if node.op == "output"]
        return found[0]

    @property
    def names_types(self) -> bool:
        """Whether a call names a type of real numbers, as `x.to(torch.float32)`: it holds in one precision alone."""
        given = (leaf for node in self.graph.nodes for leaf in tree_leaves((node.args, node.kwargs)))
        return any(isinstance(leaf, torch.dtype) and leaf.is_floating_point for leaf in given)

    @property
    def reads_values(self) -> bool:
        """Whether a module is kept whole because its code reads values of tensors."""
        return any(READS in why for why in self.whole.values())

    @property
    def is_preparing(self) -> bool:
        """Whether a module is kept whole because its code prepared what later forwards use."""
        return any(PREPARES in why for why in self.whole.values())
