"""`longspan import`: a run folder of an original implementation's checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import Any

from longspan.cli.console import say


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "import",
        help="make a run of an original's checkpoint",
        description="Make a run folder, for eval and generate, of an original implementation's checkpoint. "
        "Such a file holds no vocabulary: it is made of the corpus, as that project made it, so give the "
        "corpus that the model was trained on. Without one, and for fairseq, the run reads and writes the "
        "numbers of tokens. What the file cannot tell has the project's default.",
    )
    parser.add_argument("file", metavar="FILE", help="the checkpoint; one that could run code is refused")
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
        metavar="FILE",
        help="JSON with the original's own options (default for hf-transfo-xl: config.json beside FILE)",
    )
    parser.add_argument("--out", metavar="RUN", required=True, help="the new run folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from longspan.interop.run import import_run

    file, out = Path(args.file), Path(args.out)
    import_run(file, args.kind, out, args.data, args.config, progress=say)
    text = "" if args.data else " --data NUMBERS.txt"
    there = quote(str(out))
    print(f"{out}: try 'longspan eval {there}{text}' or 'longspan generate {there}'")
