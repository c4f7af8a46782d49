"""Tokenizer options for commands without a recipe."""

from __future__ import annotations

import argparse
import typing

from longspan.config import TokenizerConfig

_TYPES = typing.get_type_hints(TokenizerConfig)


def add_tokenizer_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    kinds, orders = typing.get_args(_TYPES["kind"]), typing.get_args(_TYPES["order"])
    parser.add_argument("--tokenizer", choices=kinds, help=f"the unit of text (default: {default})")
    parser.add_argument("--vocabulary-size", type=int, metavar="N", help="pieces or words to keep")
    parser.add_argument("--lowercase", action="store_true", help="convert text to lower case first")
    parser.add_argument("--order", choices=orders, help="order in which words and characters are numbered")
    parser.set_defaults(default_tokenizer=default)


def given_tokenizer_options(args: argparse.Namespace) -> list[str]:
    """The options that were given, as typed."""
    values = {name: getattr(args, name) for name in ("tokenizer", "vocabulary_size", "lowercase", "order")}
    given = [name for name, value in values.items() if value is not None and value is not False]
    return [f"--{name.replace('_', '-')}" for name in given]


def tokenizer_config(args: argparse.Namespace) -> TokenizerConfig:
    return TokenizerConfig(
        kind=args.tokenizer or args.default_tokenizer,
        vocabulary_size=args.vocabulary_size,
        lowercase=args.lowercase,
        order=args.order or "frequency",
    )
