"""Tokenizer options for commands without a recipe."""

from __future__ import annotations

import argparse
import typing
from typing import Any

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
    parser.add_argument(
        "--fit-bytes",
        type=int,
        metavar="N",
        help="sentencepiece, bpe: learn from about N bytes of the text, 0 for all (default: 33,554,432)",
    )
    parser.add_argument("--lowercase", action="store_true", help="convert text to lower case first")
    parser.add_argument("--order", choices=orders, help="order in which words and characters are numbered")
    parser.set_defaults(default_tokenizer=default)


def given_tokenizer_options(args: argparse.Namespace) -> list[str]:
    """The options that were given, as typed."""
    values = {
        name: getattr(args, name)
        for name in ("tokenizer", "vocabulary_size", "fit_bytes", "lowercase", "order")
    }
    given = [name for name, value in values.items() if value is not None and value is not False]
    return [f"--{name.replace('_', '-')}" for name in given]


def tokenizer_config(args: argparse.Namespace) -> TokenizerConfig:
    from longspan.data.tokenizers import check_settings

    with usage_errors():
        config = schema.read(DataConfig, {"tokenizer": tokenizer_table(args)}).tokenizer
        check_settings(config)
    return config


def tokenizer_table(args: argparse.Namespace) -> dict[str, Any]:
    """The options as a table of a recipe."""
    table = {
        "kind": args.default_tokenizer if args.tokenizer is None else args.tokenizer,
        "lowercase": args.lowercase,
        "order": args.order or "frequency",
    }
    if args.vocabulary_size is not None:
        table["vocabulary_size"] = args.vocabulary_size
    if args.fit_bytes is not None:
        table["fit_bytes"] = args.fit_bytes
    return table
