"""The `longspan` command: one thin file per subcommand.

A command module has `register(subparsers)`, which adds an `argparse` parser and sets `run=function(args)` on
it. A command that accepts dotted options such as `--model.num-layers 4` also sets `accepts_overrides=True`;
they are in the list `args.overrides`, as typed. `smaller` says what to do when memory runs out.
`parser.more_help` makes the end of a help text from the words of the command. Commands import
torch, and modules that need it, inside `run`, so that help and errors are fast.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from longspan.cli import (
    attention,
    bench,
    completion,
    cutoffs,
    data,
    eval,
    generate,
    import_,
    inspect_,
    ranks,
    recipes,
    report,
    runs,
    score,
    search,
    serve,
    spans,
    train,
)
from longspan.cli.address_space import check_address_space
from longspan.cli.examples import EXAMPLES
from longspan.cli.plugin_option import given_plugins
from longspan.cli.suggestions import OTHER_NAMES, nearest_option, same_meaning
from longspan.config import RunConfig
from longspan.config.reference import documented
from longspan.cores import settle_threads
from longspan.errors import UsageError, UserError, is_out_of_memory, nearest
from longspan.machine_memory import bound_code_of_products
from longspan.progress import say, showing
from longspan.registry import load_plugins
from longspan.streams import open_missing
from longspan.terminal import control_characters_shown
from longspan.version import VERSION

COMMANDS = {
    "train": train,
    "search": search,
    "eval": eval,
    "generate": generate,
    "spans": spans,
    "attention": attention,
    "report": report,
    "inspect": inspect_,
    "score": score,
    "data": data,
    "cutoffs": cutoffs,
    "recipes": recipes,
    "runs": runs,
    "import": import_,
    "bench": bench,
    "completion": completion,
    "serve": serve,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    A user's mistake is one line on stderr: status 2 for one in the words of the command, 1 for all others.
    """
    open_missing()
    settle_threads()
    bound_code_of_products()
    with control_characters_shown():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not support all characters
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as in arguments: a prompt may hold any bytes
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except UserError as problem:
        ranks.complain(str(problem))
        return 2 if isinstance(problem, UsageError) else 1
    except KeyboardInterrupt:
        ranks.complain("stopped")
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe (`longspan recipes | head`): redirect stdout, so that the
        # interpreter's own flush at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as problem:  # a full disk, a folder one may not write to: the system names the file
        ranks.complain(str(problem))
        return 1
    except Exception as problem:  # a fault of the program
        ranks.record(problem)
        raise
    return 0


def _show_warning(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
    """One line on stderr, without the source location; rank 0 speaks for all processes of torchrun."""
    if ranks.rank() == 0:
        say(f"longspan: warning: {message}")


def _run(argv: list[str]) -> None:
    if any("\0" in word for word in argv):
        _OneLineParser(prog="longspan").error("an argument contains a NUL character: no file has such a name")
    load_plugins(given_plugins(_OneLineParser(prog="longspan", add_help=False), argv))
    parser, subparsers = all_parsers()
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UsageError(f"unknown command '{argv[0]}'{nearest(argv[0], COMMANDS)} (see 'longspan --help')")
    plain, dotted = _set_dotted_apart(argv)
    if plain and plain[0] in COMMANDS:
        subparsers.choices[plain[0]].words = plain[1:]
    args, surplus = parser.parse_known_args(plain)
    accepts_overrides = getattr(args, "accepts_overrides", False)
    if not accepts_overrides:
        surplus, dotted = surplus + dotted, []
    if surplus:
        command = subparsers.choices.get(args.command, parser)
        raise UsageError(_complaint(command, surplus[0], accepts_overrides))
    if args.command is None:
        parser.print_help()
        return
    ranks.check_command(args.command)
    args.overrides = dotted
    check_address_space()
    try:
        with showing(quiet=getattr(args, "quiet", False) or ranks.rank() > 0):
            args.run(args)
    except (RuntimeError, MemoryError, ImportError, OSError) as problem:
        if not is_out_of_memory(problem):
            raise
        advice = getattr(args, "smaller", "use a machine with more memory, or less text")
        raise UserError(f"there is not enough memory: {advice}") from None


def all_parsers() -> tuple[argparse.ArgumentParser, Any]:
    """The parser of the command line, and that which holds the commands."""
    parser = _OneLineParser(
        prog="longspan", description="Language models with memory: train, evaluate, inspect, generate."
    )
    parser.add_argument("--version", "-V", action="version", version=f"longspan {VERSION}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in COMMANDS.values():
        module.register(subparsers)
    return parser, subparsers


def _set_dotted_apart(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split `--model.width 64` and `--model.width=64` from the rest.

    argparse does not know these options, and would take the value of the first form for a positional.
    """
    plain: list[str] = []
    dotted: list[str] = []
    awaits_value = False
    for word in argv:
        name, equals, _ = word.partition("=")
        is_dotted = name.startswith("--") and "." in name
        is_value = awaits_value and not word.startswith("--")
        (dotted if is_dotted or is_value else plain).append(word)
        awaits_value = is_dotted and not equals
    return plain, dotted


def _complaint(parser: argparse.ArgumentParser, word: str, accepts_overrides: bool) -> str:
    where = f"(see '{parser.prog} --help')"
    if not word.startswith("-"):
        return f"unexpected argument '{word}' {where}"
    option = word.partition("=")[0]
    name = option.lstrip("-")
    known = re.findall(r"--[\w-]+", parser.format_usage())
    if (same := same_meaning(name, known)) is not None:
        return f"unknown option '{option}'; did you mean '{same}'? {where}"
    example = _dotted_option(name) or _dotted_option(OTHER_NAMES.get(name, "")) if accepts_overrides else None
    if example is not None:
        return (
            f"unknown option '{option}': options of a recipe are dotted, such as --{example} "
            "('longspan train --help' lists them)"
        )
    return f"unknown option '{option}'{nearest_option(name, known)} {where}"


def _dotted_option(part: str) -> str | None:
    """An option with `part` between its dots: `model.num-layers` for `num-layers` or for `model`."""
    names = (option.name.replace("_", "-") for option in documented(RunConfig))
    return next((name for name in names if "." in name and part in name.split(".")), None)


class _OneLineParser(argparse.ArgumentParser):
    """An argument parser without abbreviations and with one-line errors."""

    more_help: Callable[[Sequence[str]], str] | None = None
    words: Sequence[str] = ()  # of the command

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def format_help(self) -> str:
        if self.more_help is not None:
            self.epilog = self.more_help(self.words)
        example = EXAMPLES.get(self.prog)
        return super().format_help() + (f"\nexample:\n  {example}\n" if example else "")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._check_given_once(args or [])
        return super().parse_known_args(args, namespace)

    def _check_given_once(self, words: Sequence[str]) -> None:
        """argparse would take the last value of an option that is given twice, without a word."""
        seen = set[str]()
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            action = self._option_string_actions.get(name)
            if action is None or isinstance(action, argparse._AppendAction):
                continue
            if action.dest in seen:
                self.error(f"{name} is given twice: give it once")
            seen.add(action.dest)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see '{self.prog} --help')")
