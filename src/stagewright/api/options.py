"""The options of each function as keywords, made of the table of options.

Editors and type checkers read them in `options.pyi`, which tests/make_options.py writes.
"""

from typing import ForwardRef, TypedDict

from stagewright.config.commands import FUNCTIONS
from stagewright.config.sections import Option

_PATHS = ("FILE", "DIR", "RUN", "NAME|FILE")  # metavars
OWN = {  # what a function takes by name, as objects too, or what only prints or writes what it returns
    "train": "model data val loss metric optimizer plan profile config set json explain",
    "plan": "data profile output report json lr momentum nesterov predict try minutes explain",
    "simulate": "data profile plan trace report json",
    "profile": "output json",
    "inspect": "data json",
}


def options_of(command: str) -> dict[str, Option]:
    """The options of a command that its function takes as keywords."""
    return {option.keyword: option for option in FUNCTIONS[command] if option.keyword not in OWN[command].split()}


def hint(option: Option) -> str:
    """The type of an option's value."""
    kind = option.type.__name__
    if option.choices:
        kind = f"Literal[{', '.join(map(repr, option.choices))}]".replace("'", '"')
    elif option.metavar in _PATHS:
        kind = "str | PathLike[str]"
    if option.keyword == "group":
        kind = f"{kind} | Mapping[str, object]"
    if option.is_repeated:
        kind = f"{kind} | Sequence[{kind}]"
    return kind if option.default is not None else f"{kind} | None"


def _keywords(command: str) -> dict[str, ForwardRef]:
    return {keyword: ForwardRef(hint(option)) for keyword, option in options_of(command).items()}


TrainOptions = TypedDict("TrainOptions", _keywords("train"), total=False)
PlanOptions = TypedDict("PlanOptions", _keywords("plan"), total=False)
SimulateOptions = TypedDict("SimulateOptions", _keywords("simulate"), total=False)
ProfileOptions = TypedDict("ProfileOptions", _keywords("profile"), total=False)
InspectOptions = TypedDict("InspectOptions", _keywords("inspect"), total=False)
