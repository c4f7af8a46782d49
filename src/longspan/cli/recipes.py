"""`longspan recipes`: the recipes, their sizes and published numbers."""

from __future__ import annotations

import argparse
import json
from typing import Any

from longspan import recipes
from longspan.cli.console import add_quiet_option
from longspan.cli.plugin_option import add_plugin_option
from longspan.config import DataConfig, RunConfig, StageConfig, schema
from longspan.progress import task

BYTES = 256
# Vocabulary sizes of fixed texts: their bytes or words, and the end of a line, which Transformer-XL leaves
# out when it reads bytes.
PUBLISHED = {
    ("enwik8", "adaptive-span"): 205,
    ("text8", "adaptive-span"): 28,
    ("wikitext-103", "adaptive-span"): 267_735,
    ("enwik8", "sha-rnn"): 205,
    ("enwik8", "transformer-xl"): 204,
    ("text8", "transformer-xl"): 27,
    ("wikitext-103", "transformer-xl"): 267_735,
}


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "recipes",
        help="list the recipes: names, sizes and published numbers",
        description="List the recipes, or print one as the TOML file that 'longspan train' takes. "
        "A TOML file of your own is summarised in the same way.",
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="print this recipe, or summarise this TOML file"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per recipe")
    add_plugin_option(parser)
    add_quiet_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.name is not None and not args.json and not args.name.endswith(".toml"):
        print(recipes.content(args.name).decode(), end="")
        return
    named = recipes.names() if args.name is None else [args.name]
    found = []
    with task("building models", "recipes", len(named)) as progress:
        for number, name in enumerate(named, 1):
            found.append(json.dumps(_facts(name)) if args.json else _summary(name))
            progress(number)
    print(("\n" if args.json else "\n\n").join(found))


def _facts(name: str) -> dict[str, Any]:
    config = schema.read(RunConfig, recipes.load(name))
    known = known_vocabulary_size(config.data)
    return {
        "name": config.name,
        "description": config.description,
        "architecture": config.architecture,
        "corpus": config.data.corpus,
        "parameters": _num_parameters(config, known or BYTES),
        "vocabulary_size": known,
        "stages": [schema.write(stage) for stage in config.stage],
        "expected": dict(config.expected),
    }


def _summary(name: str) -> str:
    config = schema.read(RunConfig, recipes.load(name))
    steps = " + ".join(_length(stage) for stage in config.stage)
    known = known_vocabulary_size(config.data)
    size = f"{_count(_num_parameters(config, known or BYTES))} parameters"
    size += "" if known else f" (with a vocabulary of {BYTES})"
    lines = [f"{config.name}: {config.description}", f"  {size}, {steps} on {config.data.corpus}"]
    numbers = [_expectation(key, value) for key, value in config.expected.items() if key != "source"]
    if numbers:
        lines.append(f"  expected: {', '.join(numbers)}")
    if "source" in config.expected:
        lines.append(f"  source: {config.expected['source']}")
    return "\n".join(lines)


def _count(number: int) -> str:
    """In millions, or below that in thousands: 6.5M, 12.3k."""
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.1f}k"


def _length(stage: StageConfig) -> str:
    limit = f" or {stage.max_seconds:g} s" if stage.max_seconds else ""
    length = f"{stage.steps:,} steps" if stage.steps else f"{stage.epochs} epochs"
    return f"{length}{limit}"


def _expectation(key: str, value: Any) -> str:
    """`test_bits_per_byte` and 1.02 become: test 1.02 bits per byte."""
    if key == "parameters":
        return f"{value / 1e6:g}M parameters"
    split, _, measure = key.partition("_")
    return f"{split} {value} {measure.replace('_', ' ')}"


def known_vocabulary_size(data: DataConfig) -> int | None:
    """The vocabulary size, if it is known without the text."""
    if data.tokenizer.kind == "byte":
        return BYTES
    return data.tokenizer.vocabulary_size or PUBLISHED.get((data.corpus, data.tokenizer.kind))


def _num_parameters(config: RunConfig, vocabulary_size: int) -> int:
    """Counted on the meta device, which uses no memory."""
    from longspan.models import build_run
    from longspan.models.skeleton import skeletons

    with skeletons():
        model = build_run(config, vocabulary_size)
    return sum(parameter.numel() for parameter in model.parameters())
