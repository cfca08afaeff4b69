"""Models of one trait each that tracing or cutting may lose, and what must come of them.

Every model takes `[samples, 12]`, or what its trait says, has four blocks where the trait leaves room for them, and is
a `--model tests.traits.FILE:NAME`. A trait says only what must hold: that a pipeline trains as the author's module does
in one process, or that it does so or is refused.
"""

from tests.traits import (
    arguments,
    backward,
    batches,
    checkpoints,
    hooks,
    memory,
    modes,
    modules,
    parameters,
    randomness,
    state,
    values,
    weights,
)
from tests.traits.trait import TRAITS, Expected, Trait

FILES = (
    *(arguments, backward, batches, checkpoints, hooks, memory, modes, modules, parameters, randomness),
    *(state, values, weights),
)
__all__ = ["FILES", "TRAITS", "Expected", "Trait"]
