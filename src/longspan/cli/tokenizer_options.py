"""Tokenizer options for commands without a recipe."""

from __future__ import annotations

import argparse
import typing

from longspan.config import DataConfig, TokenizerConfig, schema
from longspan.errors import usage_errors


def add_tokenizer_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    orders = typing.get_args(typing.get_type_hints(TokenizerConfig)["order"])
    parser.add_argument(
        "--tokenizer",
        metavar="KIND",
        help="the unit of text: byte, character, word, number, sentencepiece, sentencepiece-default, bpe, "
        f"adaptive-span, sha-rnn, transformer-xl, fairseq, or one of a plugin (default: {default})",
    )
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
    table = {
        "kind": args.tokenizer or args.default_tokenizer,
        "lowercase": args.lowercase,
        "order": args.order or "frequency",
    }
    if args.vocabulary_size is not None:
        table["vocabulary_size"] = args.vocabulary_size
    with usage_errors():
        return schema.read(DataConfig, {"tokenizer": table}).tokenizer
