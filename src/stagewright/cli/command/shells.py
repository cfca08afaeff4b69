"""Scripts by which bash, zsh and fish complete a command line, made of the table of commands.

They complete commands, actions, options, choices, models and clusters by name, and runs: the ids of the folders in
runs/ and the names in their label.json, which the script reads itself, so that a completion starts no Python.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stagewright.cli.command.command import MODEL, RUN, Command
from stagewright.config.commands import Taken

_RUN_OPTIONS = ("--resume",)
_RUNS = {"@runs": "(__stagewright_runs)"}  # of fish
_HELP = {"--help": "how it is used", "--help-all": "all options"}
_OFFER = 'COMPREPLY=($(compgen -W "{}" -- "$word"))'  # of bash
_NAMES = r"""    for folder in runs/*/; do
        if [ -f "${folder}plan.json" ]; then folder=${folder%/}; printf '%s\n' "${folder##*/}"; fi
        if [ -f "${folder%/}/label.json" ]; then
            printf '%s\n' "$(sed -n 's/^{"name": "\([A-Za-z0-9._-]*\)".*/\1/p' "${folder%/}/label.json")"
        fi
    done
    printf 'last\n'"""


@dataclass(frozen=True, slots=True)
class Names:
    """What arguments can name."""

    models: tuple[str, ...]
    clusters: tuple[str, ...]


def as_bash(commands: Sequence[Command], names: Names) -> str:
    """The script for bash."""
    cases = []
    for command in commands:
        flags = " ".join((*(flag for option in command.takes for flag in option.flags), *_HELP))
        words = " ".join(_positional(command, names))
        cases.append(_case([command.name], f"words={shlex.quote(words)} flags={shlex.quote(flags)}"))
    return f"""# bash completion of stagewright; stagewright completion bash prints it
_stagewright_runs() {{
    local folder
{_NAMES}
}}
_stagewright() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    local command=${{COMP_WORDS[1]}} words= flags=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {shlex.quote(" ".join(_tops(commands)))} -- "$word"))
        return
    fi
    case "$command" in
{_actions(commands, _OFFER, "COMP_WORDS[2]")}    esac
    case "$command" in
{"".join(cases)}    esac
    case "$command $before" in
{_values(commands, names, "words")}    esac
    case "$word" in
        -*) words=$flags ;;
    esac
    if [ "$words" = @runs ]; then words=$(_stagewright_runs 2>/dev/null); fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F _stagewright stagewright
"""


def as_zsh(commands: Sequence[Command], names: Names) -> str:
    """The script for zsh; it lists options with their help."""
    cases = []
    for command in commands:
        helps = {flag: option.help for option in command.takes for flag in option.flags} | _HELP
        words = shlex.quote(" ".join(_positional(command, names)))
        cases.append(_case([command.name], f"found={words} described=({_described(helps)})"))
    return f"""#compdef stagewright
# zsh completion of stagewright; stagewright completion zsh prints it
_stagewright_runs() {{
    local folder
    setopt local_options null_glob
{_NAMES}
}}
_stagewright() {{
    local word=${{words[CURRENT]}} before=${{words[CURRENT-1]}} command=${{words[2]}} found=
    local -a described
    if (( CURRENT == 2 )); then
        described=({_described(_tops(commands))})
        _describe command described
        return
    fi
    COMP_CWORD=$((CURRENT - 1))
    case "$command" in
{_actions(commands, "compadd -- {}", "words[3]")}    esac
    case "$command" in
{"".join(cases)}    esac
    case "$command $before" in
{_values(commands, names, "found")}    esac
    if [[ "$word" == -* ]]; then
        _describe -o option described
        return
    fi
    if [[ "$found" == @runs ]]; then found=$(_stagewright_runs 2>/dev/null); fi
    if [[ -n "$found" ]]; then compadd -- ${{=found}}; fi
    _files
}}
if [[ "$funcstack[1]" == _stagewright ]]; then _stagewright "$@"; else compdef _stagewright stagewright; fi
"""


def as_fish(commands: Sequence[Command], names: Names) -> str:
    """The script for fish; it lists commands and options with their help."""
    lines = [
        "# fish completion of stagewright; stagewright completion fish prints it",
        "function __stagewright_runs",
        "    for folder in runs/*/",
        "        test -f {$folder}plan.json; and basename $folder",
        "        test -f {$folder}label.json",
        r"""        and echo (sed -n 's/^{"name": "\([A-Za-z0-9._-]*\)".*/\1/p' {$folder}label.json)""",
        "    end",
        "    echo last",
        "end",
        "function __stagewright_is",
        "    set -l words (commandline -opc)",
        "    set -l last (math 1 + (count $argv))",
        '    test (count $words) -ge $last; and test "$words[2..$last]" = "$argv"',
        "end",
        "complete -c stagewright -n 'test (count (commandline -opc)) -eq 1' -f",
    ]
    start = "complete -c stagewright -n"
    for name, help in _tops(commands).items():
        lines.append(f"{start} 'test (count (commandline -opc)) -eq 1' -f -a {name} -d {_fish(help)}")
    for command in commands:
        group, _, action = command.name.rpartition(" ")
        if group:
            only = f"__stagewright_is {group}; and test (count (commandline -opc)) -eq 2"
            lines.append(f"{start} '{only}' -f -a {action} -d {_fish(command.help)}")
        is_it = f"{start} '__stagewright_is {command.name}'"
        lines += (f"{is_it} -a {shlex.quote(_RUNS.get(word, word))}" for word in _positional(command, names))
        for option in command.takes:
            short = f" -s {option.short[1]}" if option.short else ""
            listed = _RUNS.get(known := _known(option, names), known)
            value = "" if option.type is bool else f" -r -a {shlex.quote(listed)} -f" if listed else " -r"
            lines += (f"{is_it} -l {flag[2:]}{short}{value} -d {_fish(option.help)}" for flag in option.flags)
    return "\n".join(lines) + "\n"


SCRIPTS: dict[str, Callable[[Sequence[Command], Names], str]] = {"bash": as_bash, "zsh": as_zsh, "fish": as_fish}


def _tops(commands: Sequence[Command]) -> dict[str, str]:
    """What may follow `stagewright`: commands with their help, and groups of commands with their actions."""
    tops: dict[str, str] = {}
    for command in commands:
        group, _, action = command.name.rpartition(" ")
        if not group:
            tops[command.name] = command.help
        else:
            tops[group] = f"{tops[group]}, {action}" if group in tops else action
    return tops


def _case(patterns: Iterable[str], do: str) -> str:
    """A line of a shell's `case`."""
    return f"        {'|'.join(map(shlex.quote, patterns))}) {do} ;;\n"


def _actions(commands: Sequence[Command], offer: str, second: str) -> str:
    """Cases that complete an action, or add it to the command."""
    actions: dict[str, list[str]] = {}
    for command in commands:
        group, _, action = command.name.rpartition(" ")
        if group:
            actions.setdefault(group, []).append(action)
    return "".join(
        _case(
            [group],
            f'if [ "$COMP_CWORD" -eq 2 ]; then {offer.format(" ".join(known))}; return; fi; '
            f'command="$command ${{{second}}}"',
        )
        for group, known in actions.items()
    )


def _values(commands: Sequence[Command], names: Names, variable: str) -> str:
    """Cases that know the values of an option; where these are files or numbers, nothing is completed but files."""
    lines = []
    for command in commands:
        free: list[str] = []
        for option in command.takes:
            spelled = [f"{command.name} {flag}" for flag in (option.flag, option.short) if flag]
            if option.type is not bool and (known := _known(option, names)):
                lines.append(_case(spelled, f"{variable}={shlex.quote(known)}"))
            elif option.type is not bool:
                free += spelled
        if free:
            lines.append(_case(free, f"{variable}="))
    return "".join(lines)


def _known(option: Taken, names: Names) -> str:
    """The values of an option, by name; `@runs` for runs."""
    if option.flag in _RUN_OPTIONS:
        return "@runs"
    return " ".join({"--model": names.models, "--cluster": names.clusters}.get(option.flag, option.choices))


def _positional(command: Command, names: Names) -> list[str]:
    """What the arguments of a command can name."""
    kinds = {argument.kind for argument in command.arguments}
    if RUN in kinds:
        return ["@runs"]
    return list(names.models) if MODEL in kinds else [one for given in command.arguments for one in given.choices]


def _described(helps: dict[str, str]) -> str:
    """Words with their help, as zsh's _describe takes them."""
    return " ".join(shlex.quote(f"{word}:{help.replace(':', ' ')}") for word, help in helps.items())


def _fish(text: str) -> str:
    """A text between single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
