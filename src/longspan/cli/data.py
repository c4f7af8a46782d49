"""`longspan data`: corpora that can be had, and what is in them."""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longspan.cli.console import say
from longspan.config import DataConfig, TokenizerConfig

KINDS = typing.get_args(typing.get_type_hints(TokenizerConfig)["kind"])
ORDERS = typing.get_args(typing.get_type_hints(TokenizerConfig)["order"])


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "data",
        help="list, download, add and describe corpora",
        description="Corpora that can be had, and what is in them.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    action = actions.add_parser("list", help="the corpora that have a name")
    action.set_defaults(run=list_corpora)

    action = actions.add_parser("get", help="download a corpus")
    action.add_argument("corpus", metavar="NAME", help="a name that 'longspan data list' shows")
    action.set_defaults(run=get)

    action = actions.add_parser("add", help="give a file or folder of text a name")
    action.add_argument("name", metavar="NAME", help="what to call it")
    action.add_argument("path", metavar="PATH", type=Path, help="a text file, or a folder of text files")
    action.set_defaults(run=add)

    action = actions.add_parser("info", help="splits, sizes and vocabulary of a corpus")
    action.add_argument("corpus", metavar="NAME_OR_PATH", help="a named corpus, a text file or a folder")
    action.add_argument("--tokenizer", choices=KINDS, default="byte", help="the unit of text (default: byte)")
    action.add_argument("--vocabulary-size", type=int, metavar="N", help="pieces or words to keep")
    action.add_argument("--lowercase", action="store_true", help="turn text to lower case first")
    action.add_argument(
        "--order", choices=ORDERS, default="frequency", help="how words and characters are numbered"
    )
    action.set_defaults(run=info)


def list_corpora(args: argparse.Namespace) -> None:
    from longspan.data import corpora, registry

    rows = []
    for name, named in corpora.NAMED.items():
        folder = corpora.folder_of(name)
        ready = named.archive is None or folder.is_dir()
        where = str(folder) if named.archive and ready else "on this machine" if ready else "not downloaded"
        rows.append((name, named.about, where))
    rows += [(name, "added by you", str(path)) for name, path in registry.registered().items()]
    _show_table(("name", "what it is", "where"), rows)


def get(args: argparse.Namespace) -> None:
    from longspan.data import corpora
    from longspan.data.corpus import SPLITS

    corpus = corpora.find(args.corpus, say)
    sizes = ", ".join(f"{split} {corpus.size(split):,}" for split in SPLITS)
    print(f"{corpus.name} is here: {sizes} bytes")


def add(args: argparse.Namespace) -> None:
    from longspan.data import corpora

    place = corpora.add(args.name, args.path)
    print(f"'{args.name}' now stands for {place}")


def info(args: argparse.Namespace) -> None:
    from longspan.data import order_0_entropy, prepare

    tokenizer = TokenizerConfig(
        kind=args.tokenizer,
        vocabulary_size=args.vocabulary_size,
        lowercase=args.lowercase,
        order=args.order,
    )
    corpus = prepare(DataConfig(corpus=args.corpus, tokenizer=tokenizer), say)
    rows = []
    for split, token_file in corpus.splits.items():
        token_file.verify()
        sizes = (
            token_file.num_bytes,
            token_file.num_characters,
            token_file.num_words,
            token_file.num_tokens,
        )
        bits = order_0_entropy(token_file.tokens)
        rows.append((split, *(f"{size:,}" for size in sizes), f"{bits:.3f}"))
    header = ("split", "bytes", "characters", "words", "tokens", "order-0 bits per token")
    _show_table(header, rows, numbers=True)
    print(f"{corpus.name}: {args.tokenizer} tokens, vocabulary {corpus.tokenizer.vocabulary_size:,}")
    print(f"token files: {corpus.folder}")


def _show_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, numbers: bool = False) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for index, title in enumerate(header):
        table.add_column(title, justify="right" if numbers and index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Not a terminal: as wide as it needs to be, so that a log or a pipe gets whole lines.
    Console(width=None if sys.stdout.isatty() else 250).print(table)
