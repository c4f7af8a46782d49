"""`longspan completion`: a script that completes commands, options and their values in a shell.

Everything that can be completed is written into the script, from the parsers of the commands and from the
declarations of the options. So completion starts no program. Folders and files are left to the shell.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from longspan import recipes
from longspan.cli.completion_scripts import SCRIPTS
from longspan.config import RunConfig
from longspan.config.reference import documented
from longspan.registry import CORPORA

Values: TypeAlias = "str | tuple[str, ...]"
"""What follows: words, `file`, `folder`, `recipe`, `corpus`, `text` (any), or `flag` (nothing)."""

KINDS = {
    "RUN": "folder",
    "FOLDER": "folder",
    "FILE": "file",
    "RUN|FILE": "file",
    "FILE.png": "file",
    "FIGURE": "file",
    "PATH": "file",
    "NEW_RUN": "folder",
    "RECIPE": "recipe",
    "CORPUS": "corpus",
    "NAME_OR_PATH": "corpus",
}
DEVICES = ("auto", "cpu", "cuda")
RECIPES, CORPORA_OF = ("recipes",), ("data get", "data remove")  # commands that take one as NAME


@dataclass(frozen=True)
class Command:
    """What can follow a command."""

    name: str  # an action is a command too: `data info`
    about: str
    options: dict[str, tuple[Values, str]]  # what follows, and the help text
    arguments: tuple[Values, ...]
    dotted: tuple[str, ...]  # beginnings of the dotted options that it accepts


@dataclass(frozen=True)
class Known:
    """All that a script can complete."""

    commands: tuple[Command, ...]
    dotted: dict[str, tuple[Values, str]]
    recipes: tuple[str, ...]
    corpora: tuple[str, ...]


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="a script that completes commands in a shell",
        description="Print a script that completes commands, options, recipes and files. For bash, add to "
        "~/.bashrc: source <(longspan completion bash). For zsh, to ~/.zshrc, after compinit: source "
        "<(longspan completion zsh). For fish: longspan completion fish > "
        "~/.config/fish/completions/longspan.fish.",
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help=", ".join(SCRIPTS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from longspan.cli import all_parsers

    _, subparsers = all_parsers()
    print(SCRIPTS[args.shell](known(subparsers)), end="")


def known(subparsers: Any) -> Known:
    about = {choice.dest: choice.help or "" for choice in subparsers._choices_actions}
    commands = [
        command
        for name, parser in subparsers.choices.items()
        for command in _commands(name, about.get(name, ""), parser)
    ]
    dotted = {
        f"--{option.name.replace('_', '-')}": (_values_of_type(option.type), option.help)
        for option in documented(RunConfig)
        if "." in option.name
    }
    return Known(tuple(commands), dotted, tuple(recipes.names()), tuple(CORPORA))


def _commands(name: str, about: str, parser: argparse.ArgumentParser) -> Iterator[Command]:
    options: dict[str, tuple[Values, str]] = {}
    arguments: list[Values] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner = {choice.dest: choice.help or "" for choice in action._choices_actions}
            arguments.append(tuple(action.choices))
            for part, below in action.choices.items():
                yield from _commands(f"{name} {part}", inner.get(part, ""), below)
        elif action.option_strings:
            values = _values(name, action)
            options |= {option: (values, _plain(action.help)) for option in action.option_strings}
        else:
            arguments.append(_values(name, action))
    every = bool(parser.get_default("accepts_overrides"))
    dotted = ("--model.", "--evaluation.") if name == "eval" else ("--",)
    yield Command(name, _plain(about), options, tuple(arguments), dotted if every else ())


def _values(command: str, action: argparse.Action) -> Values:
    if action.nargs == 0:
        return "flag"
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if action.dest == "device":
        return DEVICES
    if action.metavar == "NAME" and not action.option_strings:
        return "recipe" if command in RECIPES else "corpus" if command in CORPORA_OF else "text"
    return KINDS.get(str(action.metavar), "text")


def _values_of_type(name: str) -> Values:
    """From the name of a type in the help, such as `auto | bf16` or `true or false`."""
    if name == "true or false":
        return ("true", "false")
    if re.fullmatch(r"[\w-]+( \| [\w-]+)+", name):
        return tuple(name.split(" | "))
    return "text"


def _plain(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").replace("%%", "%")
