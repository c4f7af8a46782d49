"""The completion scripts of the shells. That of bash also serves zsh, which can load such scripts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.cli.completion import Command, Known, Values

BASH = r"""# Completion of longspan, by 'longspan completion'. FILE, FOLDER and TEXT stand for what they say.

_longspan_words() {  # what can follow a command
    case "$1" in
@WORDS@    esac
}

_longspan_values() {  # what can follow an option, $2, of a command; nothing if it takes no value
    case "$1 $2" in
@VALUES@    esac
    case "$2" in
@DOTTED@    esac
}

_longspan() {
    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
    local command="" offered="" word="" paths="" runs=""
    COMPREPLY=()
    if [ "$current" = "=" ]; then  # bash splits --option=value into three words
        current=""
    elif [ "$before" = "=" ]; then
        before="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    if [ "$COMP_CWORD" -gt 1 ]; then
        command="${COMP_WORDS[1]}"
        if [ "$COMP_CWORD" -gt 2 ] && [ -n "$(_longspan_words "$command ${COMP_WORDS[2]}")" ]; then
            command="$command ${COMP_WORDS[2]}"
        fi
        offered="$(_longspan_values "$command" "$before")"
    fi
    [ -z "$offered" ] && offered="$(_longspan_words "$command")"
    for word in $offered; do
        case "$word" in
            FILE) paths=-f ;;
            FOLDER) runs=yes; [ -z "$paths" ] && paths=-d ;;
            TEXT) ;;
            -*) [[ "$current" == -* && "$word" == "$current"* ]] && COMPREPLY+=("$word") ;;
            *) [[ "$word" == "$current"* ]] && COMPREPLY+=("$word") ;;
        esac
    done
    if [ -n "$paths" ] && [[ "$current" != -* ]]; then
        type compopt >/dev/null 2>&1 && compopt -o filenames 2>/dev/null
        while IFS= read -r word; do
            COMPREPLY+=("$word")
        done < <(compgen "$paths" -- "$current"; [ -n "$runs" ] && _longspan_runs "$current")
    fi
    return 0
}

_longspan_runs() {  # the run folders below runs/, before that much has been typed
    local found
    [[ "$1" == runs/* ]] && return 0
    for found in runs/*/config.toml; do
        [ -f "$found" ] && [[ "$found" == "$1"* ]] && echo "${found%/config.toml}"
    done
}

complete -F _longspan longspan
"""

ZSH = "autoload -Uz bashcompinit && bashcompinit\n\n"

_PATHS = {"file": ["FILE"], "folder": ["FOLDER"], "text": ["TEXT"], "flag": []}


def bash(known: Known) -> str:
    commands = [command.name for command in known.commands if " " not in command.name]
    words = [_case("", [*commands, "--help", "--version"])]
    values = []
    for command in known.commands:
        arguments = [word for kind in command.arguments for word in _words(kind, known)]
        words.append(_case(command.name, [*arguments, *command.options, *_dotted(command, known)]))
        for option, (kind, _) in command.options.items():
            values.append(_case(f"{command.name} {option}", _words(kind, known)))
    dotted = [_case(option, _words(kind, known)) for option, (kind, _) in known.dotted.items()]
    script = BASH.replace("@WORDS@", "".join(words))
    return script.replace("@VALUES@", "".join(values)).replace("@DOTTED@", "".join(dotted))


def zsh(known: Known) -> str:
    return ZSH + bash(known)


def fish(known: Known) -> str:
    lines = ["# Completion of longspan, by 'longspan completion'.", "complete -c longspan -f"]
    for command in known.commands:
        name, *action = command.name.split()
        if not action:
            lines.append(_fish("__fish_use_subcommand", f"-a {name}", command.about))
        here = f"__fish_seen_subcommand_from {name}"
        if action:
            siblings = [one.name.split()[1] for one in known.commands if one.name.startswith(f"{name} ")]
            lines.append(
                _fish(
                    f"{here}; and not __fish_seen_subcommand_from {' '.join(siblings)}",
                    f"-a {action[0]}",
                    command.about,
                )
            )
            here += f"; and __fish_seen_subcommand_from {action[0]}"
        lines += _fish_command(here, command, known)
    return "\n".join(lines) + "\n"


def _fish_command(here: str, command: Command, known: Known) -> Iterator[str]:
    if not any(one.name.startswith(f"{command.name} ") for one in known.commands):  # actions come above
        for kind in command.arguments:
            yield from (_fish(here, what) for what in _fish_values(kind, known))
    accepted = {name: known.dotted[name] for name in _dotted(command, known)}
    for option, (kind, about) in {**command.options, **accepted}.items():
        spelled = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
        follows = [] if kind == "flag" else ["-r", *_fish_values(kind, known)]
        yield _fish(here, " ".join([spelled, *follows]), about)


def _fish_values(kind: Values, known: Known) -> list[str]:
    words = _words(kind, known)
    plain = [word for word in words if word not in ("FILE", "FOLDER", "TEXT")]
    found = [f"-a {_quoted(' '.join(plain))}"] if plain else []
    if "FILE" in words:
        found.append("-F")
    if "FOLDER" in words:
        found.append("-a '(__fish_complete_directories)'")
    return found


def _fish(condition: str, what: str, about: str = "") -> str:
    described = f" -d {_quoted(about)}" if about else ""
    return f"complete -c longspan -n {_quoted(condition)} {what}{described}"


def _quoted(text: str) -> str:
    """For fish, in which a backslash escapes a quote."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _dotted(command: Command, known: Known) -> list[str]:
    return [name for name in known.dotted if any(map(name.startswith, command.dotted))]


def _words(kind: Values, known: Known) -> list[str]:
    if isinstance(kind, tuple):
        return list(kind)
    if kind == "recipe":
        return [*known.recipes, "FILE"]
    if kind == "corpus":
        return [*known.corpora, "FILE"]
    return _PATHS[kind]


def _case(pattern: str, words: Iterable[str]) -> str:
    joined = " ".join(word for word in words if re.fullmatch(r"[\w.+:-]+", word))  # nothing a shell runs
    return f'        "{pattern}") echo "{joined}" ;;\n' if joined else ""


SCRIPTS: dict[str, Callable[[Known], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
