"""`longspan generate`: continue a text with a trained model."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from longspan.cli.paths import expanded
from longspan.cli.plugin_option import add_plugin_option
from longspan.errors import usage_errors


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue a text with a trained model",
        description="Continue a text and print it token by token. Without a prompt the model starts as at "
        "the beginning of a line.",
    )
    parser.add_argument("folder", type=expanded, metavar="RUN", help="the run folder")
    parser.add_argument("--prompt", default="", help="the text to continue; - reads it from standard input")
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="number of tokens (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0: always the most likely token (default: 0.8)",
    )
    parser.add_argument("--top-k", type=int, metavar="N", help="sample from the N most likely tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens with total probability P"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="default: best")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: auto)")
    add_plugin_option(parser)
    parser.set_defaults(run=run, smaller="give a shorter prompt, or another --device")


def run(args: argparse.Namespace) -> None:
    from longspan.generation import check_sampling
    from longspan.language_model import load

    with usage_errors():
        check_sampling(args.tokens, args.temperature, args.top_k, args.top_p)
    lm = load(args.folder, args.checkpoint, args.device)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    pieces = lm.stream(prompt, args.tokens, args.temperature, args.top_k, args.top_p, args.seed)
    first = next(pieces)  # errors in the prompt or the settings appear here, before any output
    print(prompt, first, sep="", end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
