"""`longspan recipes`: what can be trained, and what is expected of it."""

from __future__ import annotations

import argparse
from importlib import resources
from typing import TYPE_CHECKING, Any

from longspan import recipes
from longspan.config import RunConfig, schema
from longspan.errors import UserError, nearest

if TYPE_CHECKING:
    from longspan.config import ModelConfig

LARGEST_BYTE_VOCABULARY = 256


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "recipes",
        help="what can be trained: names, sizes and published numbers",
        description="List the recipes, or print one as the TOML file that 'longspan train' takes.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.name is None:
        print("\n\n".join(_summary(name) for name in recipes.names()))
        return
    if args.name not in recipes.names():
        hint = nearest(args.name, recipes.names())
        raise UserError(f"unknown recipe '{args.name}'{hint} ('longspan recipes' lists them)")
    print((resources.files(recipes) / f"{args.name}.toml").read_text(encoding="utf-8"), end="")


def _summary(name: str) -> str:
    config = schema.read(RunConfig, recipes.load(name))
    steps = " + ".join(f"{stage.steps:,}" for stage in config.stage)
    lines = [
        f"{name}: {config.description}",
        f"  {_num_parameters(config.model) / 1e6:.1f}M parameters, {steps} steps on {config.data.corpus}",
    ]
    if config.expected:
        lines.append(f"  expected: {', '.join(_expectation(*item) for item in config.expected.items())}")
    return "\n".join(lines)


def _expectation(key: str, value: Any) -> str:
    shown = f"{value:,}" if isinstance(value, (int, float)) else value
    return f"{key.replace('_', ' ')} {shown}"


def _num_parameters(config: ModelConfig) -> int:
    """Counted on a model without memory. The data is not looked at, so a vocabulary of bytes is assumed."""
    import torch

    from longspan.models import build

    with torch.device("meta"):
        model = build(config, LARGEST_BYTE_VOCABULARY)
    return sum(parameter.numel() for parameter in model.parameters())
