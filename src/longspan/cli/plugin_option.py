"""`--plugin MODULE`: further plugins, besides those that a recipe or a run names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def add_plugin_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="a Python module to import first; it registers what it adds (may be repeated)",
    )


def given_plugins(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The plugins that a command line names. They are imported before it is parsed: help shows their options.

    `parser` is a new one without options.
    """
    add_plugin_option(parser)
    plugins: list[str] = parser.parse_known_args(argv)[0].plugin
    return plugins
