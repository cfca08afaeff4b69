"""Records a model's forward as a graph by running it: every torch call, in order, with what it was given.

The author's Python runs as it is, on stand-ins for the model's tensors, and every call that torch sees becomes a node
of a `torch.fx.Graph`: its targets are the model's own modules, its attributes the model's own parameters. What a graph
can't hold (a value that decides what runs, a change of a Python attribute, a hook on a tensor) keeps the module whose
code does it whole, as one node.

What a first forward prepares for later ones, as transformers installs hooks and notes that in a new attribute, is no
change: the forward is recorded once it is prepared.

A comparison with the same result for every draw, such as `torch.rand([]) < 0` where layers are left out at random at
rate 0, counts as a constant: code may branch on it.
"""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType, MethodWrapperType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from stagewright.model.call import Inputs
from stagewright.model.recording import PREPARES, READS, Assign, Context, Recording, Untraceable
from stagewright.model.standin import attribute_marks, is_fake
from stagewright.torch_internals import (
    buffers_in,
    calls_intercepted,
    has_backward_hooks,
    memory_of,
    parameters_in,
    tree_flatten,
    tree_leaves,
    version_of,
)

_CONTAINERS = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer),
)
# Calls that ask for nothing that is in a tensor's memory.
_METADATA = frozenset(
    [
        *("__format__", "__hash__", "__len__", "__repr__"),
        *(
            "dim",
            "ndimension",
            "size",
            "numel",
            "nelement",
            "stride",
            "storage_offset",
            "is_contiguous",
            "is_same_size",
        ),
        *("type", "is_complex", "is_floating_point", "is_signed", "element_size"),
        *("can_cast", "promote_types", "result_type"),
        *("data_ptr", "untyped_storage", "get_device", "has_names", "is_inference", "is_pinned", "is_shared"),
    ]
)
# Calls that make a tensor of nothing but numbers, and those that do so in the shape of another one.
_LIKE = frozenset(["zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_full"])
_CONSTANTS = _LIKE | frozenset(
    [
        *("arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices"),
        *("empty", "full", "ones", "zeros", "new_empty"),
        *("tensor", "as_tensor", "new_tensor", "scalar_tensor", "from_numpy"),
    ]
)
_HOOKING = frozenset(["register_hook", "register_post_accumulate_grad_hook", "backward", "retain_grad"])
_DRAWN = frozenset(("rand", "rand_like"))  # numbers of at least 0 and below 1
_BELOW = frozenset(("lt", "__lt__"))
_PLAIN = (int, float, bool, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


@dataclass(slots=True)
class _Frame:
    """The call of a module whose code is being recorded."""

    path: str
    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Any]
    parameters: dict[str, Any]
    broken: str | None = None  # why the module must stay whole


class Recorder(TorchFunctionMode):
    """Records one forward: torch's calls by being a torch-function mode, modules' by standing in for their call."""

    def __init__(self, model: nn.Module, keep: Mapping[str, str], names: Mapping[int, str]) -> None:
        super().__init__()
        self._model = model
        self._keep = keep
        self._paths: dict[int, str] = {}
        for path, module in model.named_modules():
            self._paths.setdefault(id(module), path)
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._names: dict[int, str] = dict(names)
        for name, tensor in named:
            self._names.setdefault(id(tensor), name)
        self._kept: list[Any] = [tensor for _, tensor in named]  # alive, so that no other object gets its id
        self._nodes: dict[int, fx.Node] = {}
        self._frames: list[_Frame] = []
        self._opened: list[str] = []
        self._depth = 0  # > 0 inside a call that is recorded as one
        self._state: tuple[Any, Any] = (None, None)
        self._draws: set[str] = set()
        self._written: frozenset[int] = frozenset()  # the memory that the last call changed
        self._device = "cpu"
        self._is_training = True
        self._failed: Exception | None = None
        self._ambient: Context | None = None
        self.recording = Recording(fx.Graph())

    def run(self, example: Inputs, training: bool, context: Callable[[], AbstractContextManager[Any]]) -> Recording:
        """Run the forward once, in training or evaluation mode."""
        self._model.train(training)
        graph = self.recording.graph
        for name, tensor in zip(example.parameters_of(self._model), example.tensors, strict=True):
            self._bind(tensor, graph.placeholder(name))
        kind = example.tensors[0].device.type
        self._device = kind if kind != "meta" else "cpu"
        with torch.set_grad_enabled(training), context(), calls_intercepted(self._module, self._function):
            self._ambient = Context.now(self._device)
            self._is_training = training
            self._state = _random_states()
            with self:
                output = example.call(self._model)
        if self._failed is not None and is_fake(example.tensors[0]):
            raise self._failed
        leaves, self.recording.returned = tree_flatten(output)
        graph.output(tuple(self._argument(value) for value in leaves))
        self.recording.draws = frozenset(self._draws)
        return self.recording

    # Calls of modules.

    def _module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self._paths.get(id(module))
        if self._depth or path is None or (path == "" and self._frames):
            return original(module, *args, **kwargs)
        if self._frames and self._note_draws():
            self._break("draws numbers from Python's or numpy's generator")
        if has_backward_hooks(module):
            if not path:
                raise Untraceable("it has a backward hook", frozenset(self._draws))
            self.recording.whole[path] = "it has a backward hook"
            return self._as_one(path, module, original, args, kwargs, _checkpoint_around())
        inside = _checkpoint_around()
        if path and (inside is not None or path in self._keep or _is_leaf(module)):
            if path in self._keep:
                self.recording.whole[path] = self._keep[path]
            return self._as_one(path, module, original, args, kwargs, inside)
        graph = self.recording.graph
        before, opened = len(graph.nodes), len(self._opened)
        frame = _Frame(path, module, attribute_marks(module), dict(buffers_in(module)), dict(parameters_in(module)))
        self._frames.append(frame)
        self._opened.append(path)
        result = original(module, *args, **kwargs)
        self._check_changes(frame, result)
        self._frames.pop()
        if frame.broken is None:
            return result
        if not path:
            raise Untraceable(frame.broken, frozenset(self._draws))
        for node in reversed(list(graph.nodes)[before:]):
            node.users.clear()
            graph.erase_node(node)
        self.recording.assigned = [made for made in self.recording.assigned if not _is_below(made.module, path)]
        self.recording.whole = {name: why for name, why in self.recording.whole.items() if not _is_below(name, path)}
        self.recording.whole[path] = frame.broken
        self._opened[opened:] = [path]
        self._emit("call_module", path, args, kwargs, result)
        return result

    def _as_one(
        self,
        path: str,
        module: nn.Module,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
        inside: Mapping[str, Any] | None,
    ) -> Any:
        """Run a module unrecorded, as one node; inside an activation checkpoint, as a checkpoint of its own."""
        self._opened.append(path)
        with self._unrecorded(), self._watching_writes(args, kwargs):
            result = original(module, *args, **kwargs)
        if inside is None:
            self._emit("call_module", path, args, kwargs, result)
        else:
            owner = self.recording.graph.get_attr(path)
            given = (owner, *map(self._argument, args))
            options = {name: inside[name] for name in ("use_reentrant", "preserve_rng_state")}
            named = {name: self._argument(value) for name, value in kwargs.items()}
            self._add("call_function", checkpoint.checkpoint, given, named | options, result, context=self._ambient)
        return result

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._note_draws()

    @contextmanager
    def _watching_writes(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Note which memory a call changes of what it is given."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        versions = [*map(version_of, given)]
        yield
        changed = [tensor for tensor, version in zip(given, versions, strict=True) if version_of(tensor) != version]
        self._written = frozenset(filter(None, map(_memory, changed)))

    def _note_draws(self) -> bool:
        """Note from which generators, beside torch's, numbers were drawn since the last time."""
        now = _random_states()
        drawn = {name for name, old, new in zip(("random", "numpy"), self._state, now, strict=True) if old != new}
        self._draws |= drawn
        self._state = now
        return bool(drawn)

    def _check_changes(self, frame: _Frame, result: Any) -> None:
        """Keep a module whole whose own code drew numbers or changed attributes; record the buffers it replaced."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._require_seen(leaf)
        if self._note_draws():
            self._break("draws numbers from Python's or numpy's generator", frame)
        after = attribute_marks(frame.module)
        changed = [name for name in {**after, **frame.attributes} if after.get(name) != frame.attributes.get(name)]
        if changed:
            is_prepared = all(name.endswith("_hooks") or _is_new(frame, name) for name in changed)
            self._break(f"{PREPARES if is_prepared else 'changes its attribute'} '{changed[0]}'", frame)
        now, before = parameters_in(frame.module), frame.parameters
        if now.keys() != before.keys() or any(now[name] is not held for name, held in before.items()):
            self._break("replaces a parameter", frame)
        for name, buffer in buffers_in(frame.module).items():
            if buffer is not frame.buffers.get(name):
                if id(buffer) not in self._nodes:
                    self._break(f"replaces its buffer '{name}' by a tensor of unknown origin", frame)
                    continue
                self.recording.assigned.append(Assign(frame.path, name, self._nodes[id(buffer)]))

    def _break(self, why: str, frame: _Frame | None = None) -> None:
        """Keep the module whole whose code is running."""
        frame = frame or self._frames[-1]
        frame.broken = frame.broken or f"its forward {why}"

    # Calls of functions.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if self._depth or not self._frames or name in _METADATA:
            return func(*args, **kwargs)
        if name == "__get__" and not isinstance(result := func(*args, **kwargs), Tensor):
            return result  # a shape, a type, a device
        if name == "__bool__" and (known := self._known(args[0])) is not None:
            return known
        with self._watching_writes(args, kwargs):
            try:
                result = func(*args, **kwargs)
            except Exception as error:
                self._failed = error  # the author's code may catch it, where on real tensors there is none
                raise
        if getattr(func, "__module__", None) == "torch.autograd":
            self._break(f"computes gradients ('{name}')")
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)) or _writes(name):
            self._record_function(func, name, args, kwargs, result)
            return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "__set__":
            self._break(f"sets '{_attribute_name(func)}' of a tensor")
        elif given and not all(map(self._is_constant, given)):
            if name in _HOOKING:
                self._break(f"calls '{name}' on a tensor")
            else:
                self._break(f"{READS} ('{name}')")
        return result

    def _record_function(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if isinstance(func, MethodWrapperType) and name == "__get__":
            self._emit("call_function", getattr, (args[0], _attribute_name(func)), {}, result)
        elif args and isinstance(args[0], Tensor) and getattr(torch.Tensor, name, None) is func:
            self._emit("call_method", name, args, kwargs, result)
        else:
            self._emit("call_function", func, args, kwargs, result)

    def _function(self, apply: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """Record an autograd function as one call; torch's own checkpoint is seen from inside."""
        if self._depth or not self._frames or function is checkpoint.CheckpointFunction:
            return apply(function, *args, **kwargs)
        with self._unrecorded(), self._watching_writes(args, kwargs):
            result = apply(function, *args, **kwargs)
        self._emit("call_function", _caller(function), args, kwargs, result)
        return result

    def _emit(self, op: str, target: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        is_constant = name in _LIKE or (
            op != "call_module" and all(map(self._is_constant, given)) and (bool(given) or name in _CONSTANTS)
        )
        arguments = tuple(map(self._argument, args))
        named = {name: self._argument(value) for name, value in kwargs.items()}
        self._add(op, target, arguments, named, result, is_constant=is_constant)

    def _add(
        self,
        op: str,
        target: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        *,
        is_constant: bool = False,
        context: Context | None = None,
    ) -> None:
        node = self.recording.graph.create_node(op, target, args, kwargs)
        now = context or Context.now(self._device)
        if not self._is_training and self._ambient is not None:
            now = Context(self._ambient.grad, now.autocast)  # nothing is differentiated
        node.meta = {
            "owner": self._frames[-1].path,
            "opens": tuple(self._opened),
            "constant": is_constant,
            "context": None if now == self._ambient else now,
            "is_grad_free": context is None and isinstance(result, Tensor) and not result.requires_grad,
            "writes": self._written,
        }
        self._opened = []
        self._written = frozenset()
        self._bind(result, node)

    def _bind(self, value: Any, node: fx.Node) -> None:
        """Know a result, or the tensors in it, by its node."""
        if isinstance(value, Tensor):
            self._nodes[id(value)] = node
            self._kept.append(value)
            node.meta["memory"] = _memory(value)
            return
        items: Sequence[tuple[Any, Any]] = ()
        if isinstance(value, tuple | list):
            items = list(enumerate(value))
        elif isinstance(value, Mapping):
            items = list(value.items())
        for key, item in items:
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(item)):
                taken = self.recording.graph.call_function(operator.getitem, (node, key))
                taken.meta = node.meta | {"follows": True, "opens": ()}
                self._bind(item, taken)

    def _known(self, tensor: Tensor) -> bool | None:
        """What a comparison of a drawn number with a plain one gives, where every draw gives the same."""
        node = self._nodes.get(id(tensor))
        if node is None or tensor.numel() != 1 or _called(node) not in _BELOW or len(node.args) != 2:
            return None
        drawn, bound = node.args
        is_drawn = isinstance(drawn, fx.Node) and _called(drawn) in _DRAWN
        if not is_drawn or not isinstance(bound, int | float) or 0 < bound < 1:
            return None
        return bound >= 1

    def _is_constant(self, tensor: Tensor) -> bool:
        node = self._nodes.get(id(tensor))
        return node is not None and bool(node.meta.get("constant"))

    def _argument(self, value: Any) -> Any:
        """An argument as a graph holds it."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.generic):
            return value.item()
        if type(value) in _PLAIN or value is Ellipsis or isinstance(value, torch.device | range):
            return value
        if isinstance(value, bool | int | float | str):
            return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
        if isinstance(value, slice):
            return slice(*map(self._argument, (value.start, value.stop, value.step)))
        if type(value) is list:
            return [*map(self._argument, value)]
        if isinstance(value, tuple):
            made = map(self._argument, value)
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {key: self._argument(item) for key, item in value.items()}
        if self._frames:
            self._break(f"passes a {type(value).__name__} from one call to another")
        return None

    def _require_seen(self, tensor: Tensor) -> None:
        """Keep the running module whole where a tensor got a gradient without a recorded call, as of a function."""
        node = self._nodes.get(id(tensor))
        if node is not None and tensor.requires_grad and node.meta.get("is_grad_free") and self._frames:
            self._break("calls an autograd function in a way that torch does not show")

    def _tensor(self, tensor: Tensor) -> fx.Node:
        graph = self.recording.graph
        if (node := self._nodes.get(id(tensor))) is not None:
            self._require_seen(tensor)
            return node
        if (name := self._names.get(id(tensor))) is not None:
            return graph.get_attr(name)
        constants = self.recording.constants
        name = next((name for name, held in constants.items() if held is tensor), f"_constant_{len(constants)}")
        constants[name] = tensor
        return graph.get_attr(name)


def _memory(tensor: Tensor) -> int | None:
    """What two tensors that share memory have in common; None for a tensor without such memory."""
    try:
        return memory_of(tensor)
    except (NotImplementedError, RuntimeError):  # a sparse one, or one of a type with its own memory
        return None


def _called(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    return str(getattr(node.target, "__name__", node.target))


def _attribute_name(getter: Any) -> str:
    """Of `Tensor.grad.__get__`: grad."""
    return str(getter.__self__.__name__)


@cache
def _caller(function: Any) -> Callable[..., Any]:
    """Calls an autograd function; a name of its own, since a graph knows functions by their names."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)

    call.__name__ = f"{function.__name__}_apply"
    call.__qualname__ = f"{function.__module__}_{function.__qualname__}_{id(function)}".replace(".", "_")
    return call


def _writes(name: str) -> bool:
    """Whether a function without a result changes a tensor."""
    return name == "__setitem__" or name.startswith("_foreach_")


def _is_leaf(module: nn.Module) -> bool:
    """Whether a module is one node: torch's own layers, but for those that only hold others; scripted modules."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.")) and not isinstance(module, _CONTAINERS)


def _is_new(frame: _Frame, name: str) -> bool:
    """Whether a call made an attribute that is a plain number or text."""
    return name not in frame.attributes and isinstance(vars(frame.module)[name], bool | int | float | str)


def _is_below(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent + ".")


def _random_states() -> tuple[Any, Any]:
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), (state["state"]["key"].tobytes(), state["state"]["pos"], state["gauss"])


def _checkpoint_around() -> Mapping[str, Any] | None:
    """The options of the activation checkpoint that the running code is in, if it is in one."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == __file__ and code.co_name == "run":
            return None
        if code.co_filename == checkpoint.__file__ and code.co_name == "checkpoint":
            held = frame.f_locals
            return {
                "use_reentrant": bool(held.get("use_reentrant")),
                "preserve_rng_state": bool(
                    held.get("kwargs", {}).get("preserve_rng_state", held.get("preserve", True))
                ),
            }
        frame = frame.f_back
    return None
