"""Which parameters move alike: from the options of the optimizer and the whole model to the groups of a job.

Pure functions of the model's names, modules and shapes, so that every plan, stage and rank has the same groups.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from fnmatch import fnmatchcase

from torch import nn

from stagewright.config.groups import Group
from stagewright.config.sections import OptimizerConfig
from stagewright.errors import UserError, did_you_mean

_FEWEST = 2  # blocks of a list


def resolve_groups(model: nn.Module, options: OptimizerConfig) -> tuple[Group, ...]:
    """The groups of all trained parameters; none where all move by the options themselves.

    A parameter is in the first group whose pattern its name matches, a tied one by its first name. `--no-decay` and
    `--layer-decay` then change its decay and its rate, whatever group it is in.
    """
    if not (options.groups or options.no_decay or options.layer_decay is not None):
        return ()
    names = _all_names(model)
    matched = {name: next((g for g in options.groups if fnmatchcase(name, g.pattern)), None) for name in names}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    used = [matched[name] for name in trained]
    for group in options.groups:
        if group not in used:
            raise UserError(f"--group {group}: {_why_unused(model, group.pattern, matched, trained)}")
    after = {} if options.layer_decay is None else layers_after(model)
    default = asdict(Group.of_all(options))
    members: dict[tuple[float, ...], list[str]] = {}
    for name, parameter in trained.items():
        own = default | (found.settings if (found := matched[name]) is not None else {})
        is_norm = "norm" in type(model.get_submodule(name.rpartition(".")[0])).__name__.lower()
        if options.no_decay and (is_norm or parameter.dim() <= 1 or name.endswith("bias")):
            own["weight_decay"] = 0.0
        if options.layer_decay is not None:
            own["lr"] *= options.layer_decay ** after[name]
        del own["names"]
        members.setdefault(tuple(own.values()), []).extend(names[name])
    return tuple(Group(tuple(held), *settings) for settings, held in members.items())


def _all_names(model: nn.Module) -> dict[str, list[str]]:
    """Every name of each parameter, by its first."""
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[str]] = {name: [] for name in firsts.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[firsts[id(parameter)]].append(name)
    return found


def _why_unused(model: nn.Module, pattern: str, names: Collection[str], trained: Collection[str]) -> str:
    if own := [name for name in names if fnmatchcase(name, pattern)]:
        if any(name in trained for name in own):
            return f"every parameter that '{pattern}' matches is in an earlier group; give it before that one"
        return f"'{pattern}' matches frozen parameters only, such as '{own[0]}'; train them, or leave the group out"
    for first, *others in _all_names(model).values():
        if tied := next((other for other in others if fnmatchcase(other, pattern)), None):
            return f"'{tied}' is tied to '{first}', by which name it is grouped; write that"
    if any(fnmatchcase(name, f"{pattern}.*") for name in names):
        return f"'{pattern}' matches no parameter; did you mean '{pattern}.*'?"
    return f"'{pattern}' matches no parameter of the model; {did_you_mean(pattern, names)}"


# --- Layers -----------------------------------------------------------------------------------------------------------


def layers_after(model: nn.Module) -> dict[str, int]:
    """How many layers come after each parameter, in the order of `named_parameters`.

    Each block is a layer, with what follows it up to the next one; what comes before the first block is the lowest
    layer, and what comes after the last the highest: the embedding and the head of a transformer.
    """
    block_of = {
        name: path
        for path in _blocks(model)
        for name, _ in model.get_submodule(path).named_parameters(path, remove_duplicate=False)
    }
    names = [name for name, _ in model.named_parameters()]
    left = {block_of[name] for name in names if name in block_of}
    if len(left) < _FEWEST:
        raise UserError(
            f"--layer-decay needs like blocks (a ModuleList or Sequential of {_FEWEST} or more modules of one class), "
            f"of which {type(model).__name__} has none; give rates with --group"
        )
    layers: dict[str, int] = {}
    layer, is_head = 0, False
    for name in names:
        block = block_of.get(name)
        begins = block in left
        ends = block is None and not left and not is_head
        layer += bool(layers) and (begins or ends)
        left.discard(block or "")
        is_head |= ends
        layers[name] = layer
    return {name: layer - own for name, own in layers.items()}


def _blocks(module: nn.Module, path: str = "") -> list[str]:
    """The paths of a model's like blocks: elements of a list of one class, or of such a list inside an element."""
    found: list[str] = []
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        is_block = _is_like(module) and not any(map(_is_like, (child, *child.children())))
        found += [inner] if is_block else _blocks(child, inner)
    return found


def _is_like(module: nn.Module) -> bool:
    """Whether a module is a list of blocks of one class, all with parameters."""
    children = list(module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        and len(children) >= _FEWEST
        and len({type(child) for child in children}) == 1
        and all(any(True for _ in child.parameters()) for child in children)
    )
