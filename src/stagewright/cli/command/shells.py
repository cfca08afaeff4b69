"""Scripts by which bash, zsh and fish complete a command line, made of the table of commands.

They complete commands, actions, options, choices, models and clusters by name, and runs: the ids of the folders in
runs/ and the names in their label.json, which the script reads itself, so that a completion starts no Python.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagewright.cli.command.command import MODEL, RUN, Command
from stagewright.config.commands import Taken

_RUN_OPTIONS = ("--resume",)
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
{_actions(commands)}    esac
    case "$command" in
{_cases(commands, names)}    esac
    case "$command $before" in
{_values(commands, names)}    esac
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
{_actions(commands, zsh=True)}    esac
    case "$command" in
{_cases(commands, names, zsh=True)}    esac
    case "$command $before" in
{_values(commands, names, zsh=True)}    esac
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
    for name, help in _tops(commands).items():
        lines.append(
            f"complete -c stagewright -n 'test (count (commandline -opc)) -eq 1' -f -a {name} -d {_fish(help)}"
        )
    for command in commands:
        group, _, action = command.name.rpartition(" ")
        if group:
            only = f"__stagewright_is {group}; and test (count (commandline -opc)) -eq 2"
            lines.append(f"complete -c stagewright -n '{only}' -f -a {action} -d {_fish(command.help)}")
        is_it = f"complete -c stagewright -n '__stagewright_is {command.name}'"
        for word in _positional(command, names):
            listed = "(__stagewright_runs)" if word == "@runs" else word
            lines.append(f"{is_it} -a {shlex.quote(listed)}")
        for option in command.takes:
            short = f" -s {option.short[1]}" if option.short else ""
            known = _known(option, names)
            listed = "(__stagewright_runs)" if known == "@runs" else known
            value = "" if option.type is bool else f" -r -a {shlex.quote(listed)} -f" if listed else " -r"
            for flag in option.flags:
                lines.append(f"{is_it} -l {flag[2:]}{short}{value} -d {_fish(option.help)}")
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


def _actions(commands: Sequence[Command], *, zsh: bool = False) -> str:
    """Cases that complete an action, or add it to the command."""
    actions: dict[str, list[str]] = {}
    for command in commands:
        group, _, action = command.name.rpartition(" ")
        if group:
            actions.setdefault(group, []).append(action)
    lines = []
    for group, known in actions.items():
        if zsh:
            do = f"compadd -- {' '.join(known)}; return"
        else:
            do = f'COMPREPLY=($(compgen -W "{" ".join(known)}" -- "$word")); return'
        word = "words[3]" if zsh else "COMP_WORDS[2]"
        lines.append(f'        {group}) if [ "$COMP_CWORD" -eq 2 ]; then {do}; fi; command="$command ${{{word}}}" ;;\n')
    return "".join(lines)


def _cases(commands: Sequence[Command], names: Names, *, zsh: bool = False) -> str:
    """Cases that know the options of a command, and what its arguments can name."""
    lines = []
    for command in commands:
        flags = [flag for option in command.takes for flag in option.flags] + ["--help", "--help-all"]
        words = " ".join(_positional(command, names))
        if zsh:
            helps = {flag: option.help for option in command.takes for flag in option.flags}
            lines.append(
                f"        {shlex.quote(command.name)}) found={shlex.quote(words)} "
                f"described=({_described(helps | {'--help': 'how it is used', '--help-all': 'all options'})}) ;;\n"
            )
        else:
            listed = f"words={shlex.quote(words)} flags={shlex.quote(' '.join(flags))}"
            lines.append(f"        {shlex.quote(command.name)}) {listed} ;;\n")
    return "".join(lines)


def _values(commands: Sequence[Command], names: Names, *, zsh: bool = False) -> str:
    """Cases that know the values of an option; where these are files or numbers, nothing is completed but files."""
    lines = []
    for command in commands:
        free = []
        for option in command.takes:
            spelled = "|".join(
                shlex.quote(f"{command.name} {flag}") for flag in filter(None, (option.flag, option.short))
            )
            if option.type is bool:
                continue
            if known := _known(option, names):
                lines.append(f"        {spelled}) {'found' if zsh else 'words'}={shlex.quote(known)} ;;\n")
            else:
                free.append(spelled)
        if free:
            lines.append(f"        {'|'.join(free)}) {'found' if zsh else 'words'}= ;;\n")
    return "".join(lines)


def _known(option: Taken, names: Names) -> str:
    """The values of an option, by name; `@runs` for runs."""
    if option.flag in _RUN_OPTIONS:
        return "@runs"
    known = {"--model": names.models, "--cluster": names.clusters}.get(option.flag, option.choices)
    return " ".join(known)


def _positional(command: Command, names: Names) -> list[str]:
    """What the arguments of a command can name."""
    kinds = {argument.kind for argument in command.arguments}
    if RUN in kinds:
        return ["@runs"]
    if MODEL in kinds:
        return list(names.models)
    return [choice for argument in command.arguments for choice in argument.choices]


def _described(helps: dict[str, str]) -> str:
    """Words with their help, as zsh's _describe takes them."""
    return " ".join(shlex.quote(f"{word}:{help.replace(':', ' ')}") for word, help in helps.items())


def _fish(text: str) -> str:
    """A text between single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
