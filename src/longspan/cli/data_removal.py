"""`longspan data remove` and `longspan data clean`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_removal_actions(actions: Any) -> None:
    action = actions.add_parser(
        "remove",
        help="remove an added name, or a downloaded corpus",
        description="Remove a name that you added (your text stays where it is), or the files of a "
        "downloaded corpus, and the token files made from it.",
    )
    action.add_argument("corpus", metavar="NAME", help="a name that 'longspan data list' shows")
    action.set_defaults(run=remove)

    action = actions.add_parser(
        "clean",
        help="remove token files, which are made again when needed",
        description="Remove all token files from the cache folder. They are made again when needed. Your "
        "texts, the names you added and run folders stay.",
    )
    action.add_argument("--downloads", action="store_true", help="also remove downloaded corpora")
    action.add_argument(
        "--stdin",
        action="store_true",
        help="also remove texts that came from standard input: runs on them cannot be resumed any more",
    )
    action.set_defaults(run=clean)


def remove(args: argparse.Namespace) -> None:
    from longspan.data.removal import remove as remove_corpus

    _show(f"'{args.corpus}' was removed", *remove_corpus(args.corpus))


def clean(args: argparse.Namespace) -> None:
    from longspan.data.removal import clean as clean_cache

    _show("the cache folder was cleaned", *clean_cache(downloads=args.downloads, stdin=args.stdin))


def _show(what: str, removed: list[Path], size: int) -> None:
    for path in removed:
        print(f"removed {path}")
    print(f"{what}: {size / 1e6:,.1f} MB freed")
