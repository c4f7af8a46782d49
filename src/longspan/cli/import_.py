"""`longspan import`: make a run folder from a checkpoint of an original implementation."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import Any

from longspan.cli.console import say
from longspan.cli.paths import check_parent, expanded


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "import",
        help="import a checkpoint of an original implementation",
        description="Make a run folder, for eval and generate, from a checkpoint of an original "
        "implementation. Such a file has no vocabulary. It is rebuilt from the corpus, so give the corpus "
        "that the model was trained on. Without a corpus, and for fairseq, the run reads and writes token "
        "numbers. Options that the file does not contain have the project's defaults.",
    )
    parser.add_argument(
        "file",
        type=expanded,
        metavar="FILE",
        help="the checkpoint; a file that could run code is refused",
    )
    parser.add_argument(
        "--from",
        dest="kind",
        metavar="KIND",
        required=True,
        help="adaptive-span, fairseq-adaptive-span, sha-rnn, transformer-xl or hf-transfo-xl",
    )
    parser.add_argument("--data", metavar="CORPUS", help="the corpus it was trained on")
    parser.add_argument(
        "--config",
        type=expanded,
        metavar="FILE",
        help="JSON with the original's options (default for hf-transfo-xl: config.json next to FILE)",
    )
    parser.add_argument("--out", type=expanded, metavar="RUN", required=True, help="the new run folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from longspan.interop.run import import_run

    file, out = Path(args.file), Path(args.out)
    check_parent(out)
    import_run(file, args.kind, out, args.data, args.config, progress=say)
    text = "" if args.data else " --data NUMBERS.txt"
    there = quote(str(out))
    print(f"{out}: try 'longspan eval {there}{text}' or 'longspan generate {there}'")
