"""Options of commands that train: a recipe, changes to it, the run folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from longspan import recipes
from longspan.cli import ranks
from longspan.cli.overrides import changed, split_overrides
from longspan.cli.paths import check_parent, expanded
from longspan.cli.plugin_option import add_plugin_option
from longspan.config import RunConfig
from longspan.config.schema import write
from longspan.errors import UsageError, UserError
from longspan.files import free_folder

if TYPE_CHECKING:
    from longspan.runs import RunFolder
    from longspan.runs.init import Init
    from longspan.training import Interrupted, Reporter, Strategy


def add_options(parser: argparse.ArgumentParser, default: str) -> None:
    """`default` is the recipe to use if none is given."""
    parser.add_argument(
        "recipe",
        nargs="?",
        type=expanded,
        metavar="RECIPE",
        help=f"a name from 'longspan recipes' or a TOML file (default: {default})",
    )
    parser.add_argument(
        "--data",
        metavar="CORPUS",
        help="a named corpus, a text or .jsonl file, a folder, a glob such as 'texts/*.txt', files separated "
        "by commas, or - for standard input",
    )
    parser.add_argument(
        "--binary", action="store_true", help="the data may be any bytes, not only text: --data.binary true"
    )
    parser.add_argument("--name", help="name of the run (default: that of --out, else the recipe's)")
    parser.add_argument(
        "--out", type=expanded, metavar="RUN", help="the new run folder (default: runs/ and the name)"
    )
    parser.add_argument(
        "--resume",
        type=expanded,
        metavar="RUN",
        help="continue a run that was stopped; with options such as --stage.0.steps it may also go on longer",
    )
    parser.add_argument(
        "--or-resume", action="store_true", help="with --out RUN: continue the run if its folder exists"
    )
    parser.add_argument(
        "--init",
        type=expanded,
        metavar="RUN|FILE",
        help="start from the weights of a run, trained or imported, or of a checkpoint; the tokenizer is "
        "that of the run unless --data.tokenizer.* is given, and without RECIPE so is the configuration",
    )
    parser.add_argument(
        "--init-partial",
        action="store_true",
        help="with --init: take the weights that fit and leave the others",
    )
    told = parser.add_mutually_exclusive_group()
    told.add_argument("--quiet", action="store_true", help="print only the result")
    told.add_argument(
        "--verbose",
        action="store_true",
        help="print every line of metrics, also where a status line is shown",
    )
    add_plugin_option(parser)
    parser.set_defaults(
        accepts_overrides=True,
        default_recipe=default,
        smaller="raise training.micro_batches, or lower training.batch_size, training.block_length or the "
        "sizes of the model; if it happened during evaluation, lower evaluation.batch_size",
    )


def reporter(args: argparse.Namespace) -> Reporter:
    """What prints the progress: nothing with --quiet; on stderr if stdout is for --json."""
    from longspan.training import Reporter, reporter_for

    if args.quiet:
        return Reporter()
    return reporter_for(sys.stderr if getattr(args, "json", False) else sys.stdout, verbose=args.verbose)


@dataclass(frozen=True)
class Wanted:
    """What a command asks for."""

    config: RunConfig | None  # None: as it is in the folder of a run to resume
    out: Path
    init: Init | None
    resumes: bool

    def check_text(self) -> None:
        """Raise at once if there is no text to train on: what trains takes seconds to import."""
        from longspan.data import corpora

        if self.config is not None and not self.resumes and self.config.data.corpus:
            corpora.check_path(self.config.data.corpus)

    def start(self, reporter: Reporter, strategy: type[Strategy]) -> RunFolder:
        """Train or resume. A signal that stopped the training ends the program, with a line that says so."""
        from longspan.training import Interrupted, resume, train

        try:
            if self.resumes:
                return resume(self.out, self.config, init=self.init, reporter=reporter, strategy=strategy)
            assert self.config is not None
            return train(self.config, self.out, init=self.init, reporter=reporter, strategy=strategy)
        except Interrupted as stop:
            self._say_how_to_continue(stop)
            sys.exit(stop.exit_status)

    def _say_how_to_continue(self, stop: Interrupted) -> None:
        from longspan.runs import RunFolder

        ranks.wait_for_first()
        if ranks.rank() == 0:
            command = RunFolder(self.out).resume_command
            if ranks.several():
                command = f"torchrun ... -m {command}"
            print(f"longspan: {stop}; continue with '{command}'", file=sys.stderr)


def wanted(args: argparse.Namespace) -> Wanted:
    given = {
        "RECIPE": args.recipe,
        "--data": args.data,
        "--name": args.name,
        "--out": args.out,
        "--resume": args.resume,
        "--init": args.init,
    }
    for option, value in given.items():
        if value == "":  # most likely an unset shell variable
            raise UsageError(f"{option} is empty: give it a value or leave it out")
    if args.or_resume and not args.out:
        raise UsageError("--or-resume needs the run folder: give --out RUN")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and not (args.or_resume or args.resume):
        raise UsageError(
            "torchrun restarts failed processes, which then continue the run: give --out RUN --or-resume, or "
            "leave out --max-restarts"
        )
    if args.init_partial and not args.init:
        raise UsageError("--init-partial needs the weights to start from: give --init RUN")
    if args.resume is None:
        init = _init(args)
        config = _configuration(args, init)
        out = Path(args.out) if args.out else free_folder(Path("runs") / config.name)
        check_parent(out)
        return Wanted(config, out, init, resumes=args.or_resume and out.exists())
    if args.recipe or args.data or args.binary or args.name or args.out or args.init:
        raise UsageError(
            "--resume continues a run as it is: leave out all other options, except dotted ones such as "
            "--stage.0.steps"
        )
    run = Path(args.resume)
    return Wanted(_changed_run(run, args.overrides), run, None, resumes=True)


def _changed_run(run: Path, overrides: Sequence[str]) -> RunConfig | None:
    """The configuration of a run with other values of some options; None without any."""
    if not overrides:
        return None
    from longspan.runs import RunFolder

    return changed(write(RunFolder.open(run).config), split_overrides(overrides), str(run))


def _init(args: argparse.Namespace) -> Init | None:
    if not args.init:
        return None
    from longspan.runs.init import Init

    names = [name for name, _ in split_overrides(args.overrides)]
    own = any(name.startswith("data.tokenizer") for name in names)
    return Init(Path(args.init), partial=args.init_partial, with_tokenizer=not own)


def _configuration(args: argparse.Namespace, init: Init | None) -> RunConfig:
    if args.recipe and args.recipe not in recipes.names() and _is_text(Path(args.recipe)):
        raise UserError(f"{args.recipe} is not a recipe: to train on it, use --data {quote(args.recipe)}")
    table = _table(args, init)
    _add_plugins(table, args.plugin)
    given = split_overrides(args.overrides)
    names = {name.replace("-", "_") for name, _ in given}
    for option, value, dotted in (("--data", args.data, "corpus"), ("--binary", args.binary, "binary")):
        if value and f"data.{dotted}" in names:
            raise UsageError(f"{option} and --data.{dotted} are the same option: give one")
    if args.data is not None:
        given.insert(0, ("data.corpus", args.data))
    if args.binary:
        given.insert(0, ("data.binary", "true"))
    if args.name is not None:
        given.insert(0, ("name", args.name))
    elif args.out is not None:
        given.insert(0, ("name", os.path.basename(os.path.abspath(args.out))))
    return changed(table, given, args.recipe or args.default_recipe)


def _table(args: argparse.Namespace, init: Init | None) -> dict[str, Any]:
    if init is not None and not args.recipe:
        return init.recipe()
    return recipes.load(args.recipe or args.default_recipe)


def _add_plugins(table: dict[str, Any], plugins: Sequence[str]) -> None:
    """The configuration of the run names its plugins, so that it can be resumed and used without --plugin."""
    named = table.get("plugins", [])
    if plugins and isinstance(named, list):
        table["plugins"] = list(dict.fromkeys([*named, *plugins]))


def _is_text(path: Path) -> bool:
    return path.exists() and path.suffix != ".toml"
