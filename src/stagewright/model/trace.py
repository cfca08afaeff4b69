"""Any model as a chain of units, and the cutting of that chain into stages."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

_CALLS = ("call_module", "call_function", "call_method")


def as_module(parts: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """A user's own list of parts is a chain of them; a module is itself."""
    return parts if isinstance(parts, nn.Module) else nn.Sequential(*parts)


class _Tracer(fx.Tracer):
    """Traces into modules; one whose own code can't be traced stays whole, as one unit."""

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        known = set(self.graph.nodes)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # the module's own code ran on symbols: any error means that it stays whole
            for node in reversed([node for node in self.graph.nodes if node not in known]):
                self.graph.erase_node(node)
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return super().getattr(attr, attr_val, {})  # a node that call_module erased must not be found again


def trace(model: nn.Module) -> fx.Graph:
    optional = {
        name: parameter.default
        for name, parameter in list(inspect.signature(model.forward).parameters.items())[1:]
        if parameter.default is not inspect.Parameter.empty
    }
    graph = _Tracer().trace(model, concrete_args=optional or None)
    for node in reversed(list(graph.nodes)):  # what the tracer adds for arguments that keep their default
        guard = node.op == "call_function" and getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none")
        if (guard or node.op == "placeholder") and not node.users and node is not next(iter(graph.nodes)):
            graph.erase_node(node)
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise ValueError(f"forward takes {len(inputs)} arguments ({', '.join(inputs)}), not one tensor")
    return graph


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op in _CALLS]


def unit_names(nodes: Sequence[fx.Node]) -> list[str]:
    """A module's own name where it is called first, otherwise the name of the call."""
    names: dict[str, None] = {}
    for node in nodes:
        name = str(node.target) if node.op == "call_module" and str(node.target) not in names else node.name
        names[name if name not in names else f"{name}#{len(names)}"] = None
    return list(names)
