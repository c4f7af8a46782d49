"""`longspan data`: the available corpora, and what is in them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from longspan.cli.console import add_quiet_option, show_table
from longspan.cli.data_removal import add_removal_actions
from longspan.cli.plugin_option import add_plugin_option
from longspan.cli.tokenizer_options import add_tokenizer_options, tokenizer_table
from longspan.config import DataConfig, schema
from longspan.errors import UsageError, usage_errors
from longspan.progress import task, tell

_FIELD = "the field of .jsonl files that has the text (default: text)"


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "data",
        help="list, download, add and describe corpora",
        description="The available corpora, and what is in them.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    action = actions.add_parser("list", help="list the named corpora")
    action.add_argument("--json", action="store_true", help="print one JSON object per corpus")
    add_plugin_option(action)
    action.set_defaults(run=list_corpora)

    action = actions.add_parser("get", help="download a corpus")
    action.add_argument("corpus", metavar="NAME", help="a name that 'longspan data list' shows")
    add_plugin_option(action)
    add_quiet_option(action)
    action.set_defaults(run=get)

    action = actions.add_parser("add", help="give a file or folder of text a name")
    action.add_argument("name", metavar="NAME", help="the name")
    action.add_argument("path", metavar="PATH", help="a text file, or a folder of text files")
    action.add_argument(
        "--follow-links", action="store_true", help="allow links in the folder to files outside of it"
    )
    action.add_argument("--binary", action="store_true", help="it may hold any bytes, not only text")
    action.add_argument("--field", metavar="NAME", help=_FIELD)
    add_quiet_option(action)
    action.set_defaults(run=add)

    add_removal_actions(actions)

    action = actions.add_parser("info", help="splits, sizes and vocabulary of a corpus")
    action.add_argument(
        "corpus",
        metavar="NAME_OR_PATH",
        help="a named corpus, a text or .jsonl file, a folder, a glob, files separated by commas, or -",
    )
    action.add_argument("--binary", action="store_true", help="take any bytes, not only text")
    action.add_argument("--field", metavar="NAME", help=_FIELD)
    action.add_argument(
        "--verify",
        action="store_true",
        help="read every byte of the text and the token files again, even if nothing seems to have changed",
    )
    action.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes that turn text into tokens (default: the usable cores; small texts: 1)",
    )
    action.add_argument("--json", action="store_true", help="print one JSON object")
    add_tokenizer_options(action, default="byte")
    add_plugin_option(action)
    add_quiet_option(action)
    action.set_defaults(run=info)


def list_corpora(args: argparse.Namespace) -> None:
    from longspan.data import corpora, named_paths
    from longspan.registry import CORPORA

    rows = []
    for name, entry in CORPORA.items():
        folder = corpora.folder_of(name)
        where = str(folder) if folder.is_dir() else "not downloaded"
        if name not in corpora.ARCHIVES:
            where = (
                "on this machine" if isinstance(entry.made_by, str) else f"plugin {entry.made_by.__module__}"
            )
        rows.append((name, entry.about, where))
    rows += [(name, "added by you", str(path)) for name, path in named_paths.registered().items()]
    if args.json:
        for name, about, where in rows:
            print(json.dumps({"name": name, "about": about, "where": where}))
        return
    show_table(("name", "what it is", "where"), rows)


def get(args: argparse.Namespace) -> None:
    from longspan.data import corpora
    from longspan.data.corpus import SPLITS

    corpus = corpora.find(args.corpus, tell)
    sizes = ", ".join(f"{split} {corpus.size(split):,}" for split in SPLITS)
    print(f"{corpus.name} is ready: {sizes} bytes")


def add(args: argparse.Namespace) -> None:
    from longspan.data import corpora

    if not args.path:
        raise UsageError("PATH is empty: give a text file, or a folder of text files")
    with task(f"checking {args.path}"):
        place = corpora.add(
            args.name, Path(args.path), follow_links=args.follow_links, binary=args.binary, field=args.field
        )
    print(f"'{args.name}' now stands for {place}")


def info(args: argparse.Namespace) -> None:
    from longspan.data import order_0_entropy, prepare
    from longspan.data.preparation import forget_checks
    from longspan.data.tokenizers import check_settings

    if args.verify:
        forget_checks()
    table = {"corpus": args.corpus, "binary": args.binary, "tokenizer": tokenizer_table(args)}
    for name in ("field", "processes"):
        if getattr(args, name) is not None:
            table[name] = getattr(args, name)
    with usage_errors():
        config = schema.read(DataConfig, table)
        check_settings(config.tokenizer)
    corpus = prepare(config, tell)
    rows, splits = [], dict[str, dict[str, Any]]()
    for split, token_file in corpus.splits.items():
        sizes = (
            token_file.num_bytes,
            token_file.num_characters,
            token_file.num_words,
            token_file.num_tokens,
        )
        with task(f"counting the tokens of {split}"):
            bits = order_0_entropy(token_file.tokens)
        splits[split] = dict(zip(("bytes", "characters", "words", "tokens"), sizes, strict=True))
        splits[split] |= {"order_0_bits_per_token": bits}
        rows.append((split, *(f"{size:,}" for size in sizes), f"{bits:.3f}"))
    if args.json:
        facts: dict[str, Any] = {"name": corpus.name, "tokenizer": corpus.tokenizer.kind}
        facts |= {"vocabulary_size": corpus.tokenizer.vocabulary_size, "token_files": str(corpus.folder)}
        print(json.dumps(facts | {"splits": splits}))
        return
    header = ("split", "bytes", "characters", "words", "tokens", "order-0 bits per token")
    show_table(header, rows, numbers=True)
    print(f"{corpus.name}: {corpus.tokenizer.kind} tokens, vocabulary {corpus.tokenizer.vocabulary_size:,}")
    print(f"token files: {corpus.folder}{' (verified)' if args.verify else ''}")
