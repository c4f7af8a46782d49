"""`longspan score`: bits per byte of files, one line each."""

from __future__ import annotations

import argparse
from typing import Any

from longspan.cli.console import add_quiet_option
from longspan.cli.paths import expanded
from longspan.cli.plugin_option import add_plugin_option
from longspan.cli.text_input import TextInput, check_file
from longspan.json_text import to_json
from longspan.progress import task


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "score",
        help="bits per byte of files, one line a file",
        description="Print a line for each file, with tabs between: file, bytes, tokens, bits per byte. "
        "Every file is read from its start, as after a line end. '-' is standard input.",
    )
    parser.add_argument("folder", type=expanded, metavar="RUN", help="the run folder")
    parser.add_argument("files", nargs="+", type=expanded, metavar="FILE", help="text files, or -")
    parser.add_argument("--json", action="store_true", help="print one JSON object per file")
    add_quiet_option(parser)
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="default: best")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: auto)")
    add_plugin_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    for name in args.files:
        check_file(name)
    from longspan.inspection.surprise import Totals, inspect_blocks
    from longspan.language_model import load

    lm = load(args.folder, args.checkpoint, args.device)
    start = lm.read("")
    for name in args.files:
        with task(f"scoring {name}", "bytes") as progress:
            text, totals = TextInput(name, lm.tokenizer, progress), Totals()
            for _ in inspect_blocks(lm.model, text.chunks(), start, totals, attention_tokens=0):
                text.tell(totals.tokens)
        known = lm.tokenizer.knows_text and text.bytes > 0
        per_byte = totals.bits / text.bytes if known else None
        if args.json:
            fields = {"file": name, "bytes": text.bytes, "tokens": totals.tokens, "bits": totals.bits}
            print(to_json(fields | {"bits_per_byte": per_byte}), flush=True)
        else:
            shown = "-" if per_byte is None else f"{per_byte:.4f}"
            print(name, text.bytes, totals.tokens, shown, sep="\t", flush=True)
