"""`longspan bench`: speed of training and decoding on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from longspan import recipes
from longspan.cli.console import STDOUT, add_json_option, add_quiet_option, show_table
from longspan.cli.overrides import changed, split_overrides
from longspan.cli.paths import check_writable
from longspan.cli.plugin_option import add_plugin_option
from longspan.cli.recipes import BYTES, known_vocabulary_size
from longspan.errors import UsageError, UserError
from longspan.files import whole_file
from longspan.json_text import to_json
from longspan.progress import tell

if TYPE_CHECKING:
    import torch

    from longspan.bench import Figures

# --batch-size is short for --training.batch-size, and so on.
SHORT = ("batch_size", "block_length")
# The recipes' shapes are for a GPU: too slow on a CPU.
SMALL = {"training.batch_size": "2", "training.block_length": "128", "training.micro_batches": "1"}


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="speed of training and decoding on this machine",
        description="Time training steps of recipes, optimizer included, on the reference path and on the "
        "fast path, after checking that both compute the same. Weights and tokens are random. Dotted "
        "options change the recipes, for example --training.precision float32.",
    )
    parser.add_argument(
        "recipes",
        nargs="*",
        metavar="RECIPE",
        help=f"names from 'longspan recipes' or TOML files (default: {recipes.DEFAULT})",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--batch-size", metavar="N", help="default: the recipe's; on a CPU 2")
    parser.add_argument("--block-length", metavar="N", help="default: the recipe's; on a CPU 128")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps (default: 10)")
    parser.add_argument(
        "--spans",
        choices=("start", "profile"),
        default="start",
        help="learned spans as at the start of training, or as training may end: most heads short, a few "
        "long (default: start)",
    )
    parser.add_argument("--decode", action="store_true", help="also time the decoding of one text")
    add_plugin_option(parser)
    add_json_option(parser, "all figures")
    add_quiet_option(parser)
    parser.set_defaults(
        run=run, accepts_overrides=True, smaller="give a smaller --batch-size or --block-length"
    )


def run(args: argparse.Namespace) -> None:
    if args.steps < 1:
        raise UsageError(f"--steps must be at least 1, not {args.steps}")
    if args.json not in (None, STDOUT):
        if args.json.exists():
            raise UserError(f"{args.json} exists already: give another name with --json")
        check_writable(args.json)
    from longspan.bench import Bench
    from longspan.runs import pick_device
    from longspan.runs.environment import environment

    device = pick_device(args.device)
    options = _options(args, device)
    benches = []
    for name in args.recipes or [recipes.DEFAULT]:
        table = recipes.load(name)
        table.get("training", {}).pop("segment_length", None)  # tokens are random, and blocks of any length
        config = changed(table, options.items(), name)
        vocabulary_size = known_vocabulary_size(config.data) or BYTES
        benches.append(Bench(config, vocabulary_size, device, spans=args.spans, say=tell))
    # All checks before the first measurement: a broken path must not cost time.
    agreements = [bench.check() for bench in benches]
    figures = [
        bench.measure(agreement, steps=args.steps, decode=args.decode)
        for bench, agreement in zip(benches, agreements, strict=True)
    ]
    if args.json is not None:
        report = {"environment": environment(device), "figures": [one.as_json() for one in figures]}
        text = to_json(report, indent=2)
        if args.json == STDOUT:
            print(text)
            return
        with whole_file(args.json) as partial:
            partial.write_text(text + "\n")
    _show(figures)


def _options(args: argparse.Namespace, device: torch.device) -> dict[str, str]:
    """The options to change in every recipe."""
    given = {name.replace("-", "_"): value for name, value in split_overrides(args.overrides)}
    if "training.device" in given:
        raise UsageError("--training.device is for training: use --device")
    for short in SHORT:
        value, name = getattr(args, short), f"training.{short}"
        if value is not None and name in given:
            raise UsageError(f"--{short} and --{name} are the same option: give one".replace("_", "-"))
        if value is not None:
            given[name] = value
    return SMALL | given if device.type == "cpu" else given


def _show(figures: Sequence[Figures]) -> None:
    rows = []
    for one in figures:
        spans = "no spans" if one.spans == "none" else f"spans {one.spans}"
        shape = f"{one.batch_size} x {one.block_length}, {one.precision}, {spans}"
        for steps in one.steps:
            speed = f"{steps.tokens_per_second(one.work):,.0f}", f"{1e3 * steps.median_seconds:,.1f}"
            share = f"{steps.share_of_matrix_rate(one.work):.1%}"
            rows.append((one.recipe, shape, steps.path, *speed, _memory(steps.peak_memory_bytes), share))
    show_table(
        ("recipe", "step", "path", "tokens/s", "ms", "peak memory", "share of matrix rate"),
        rows,
        numbers=True,
    )
    for one in figures:
        if one.speedup is not None:
            print(f"{one.recipe}: the fast path is {one.speedup:.2f} times as fast as the reference path")
    for one in figures:
        if one.decoding is not None:
            print(
                f"{one.recipe}: decodes {one.decoding.tokens_per_second:,.0f} tokens/s; reading all weights "
                f"once per token would allow {one.decoding.floor_tokens_per_second:,.0f}, "
                f"{one.decoding.times_of_floor:.2f} times as many"
            )


def _memory(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.2f} GiB"
