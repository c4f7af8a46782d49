"""How commands without a recipe are told how text becomes tokens."""

from __future__ import annotations

import argparse
import typing

from longspan.config import TokenizerConfig

_TYPES = typing.get_type_hints(TokenizerConfig)


def add_tokenizer_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    kinds, orders = typing.get_args(_TYPES["kind"]), typing.get_args(_TYPES["order"])
    parser.add_argument(
        "--tokenizer", choices=kinds, default=default, help=f"the unit of text (default: {default})"
    )
    parser.add_argument("--vocabulary-size", type=int, metavar="N", help="pieces or words to keep")
    parser.add_argument("--lowercase", action="store_true", help="turn text to lower case first")
    parser.add_argument(
        "--order", choices=orders, default="frequency", help="how words and characters are numbered"
    )


def tokenizer_config(args: argparse.Namespace) -> TokenizerConfig:
    return TokenizerConfig(
        kind=args.tokenizer,
        vocabulary_size=args.vocabulary_size,
        lowercase=args.lowercase,
        order=args.order,
    )
