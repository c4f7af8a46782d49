"""`longspan eval --context-curve`: what looking back is worth on a text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli.figures import lanes, meaningless
from longspan.cli.paths import as_path, check_writable
from longspan.cli.scoring import notes_on, title
from longspan.errors import UsageError, UserError
from longspan.json_text import to_json
from longspan.progress import task

if TYPE_CHECKING:
    from longspan.data import TokenFile
    from longspan.evaluation import ContextCurve, ContextPoint
    from longspan.language_model import LoadedModel

_ONLY_HERE = ("contexts", "curve_tokens", "figure")
MOST_DIGITS = 18
_NOT_HERE = ("no_memory", "by_position", "protocol", "dynamic")


def add_curve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--context-curve",
        action="store_true",
        help="print bits per byte as a function of how many tokens of the past the model may see",
    )
    parser.add_argument(
        "--contexts",
        metavar="N,N,...",
        help="the curve's numbers of tokens (default: 16,64,256,1024,4096,8192); all of the past is always "
        "measured too",
    )
    parser.add_argument(
        "--curve-tokens",
        metavar="N",
        help="how many tokens the curve scores, the same for every context (default: 32768)",
    )
    parser.add_argument(
        "--figure", type=as_path, metavar="FILE.png", help="also draw the curve, as PNG or SVG"
    )


def check_curve(args: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    """Raise for options that contradict each other, before anything is loaded."""
    if not args.context_curve:
        for name in _ONLY_HERE:
            if getattr(args, name) is not None:
                raise UsageError(f"--{name} is for the context curve: give --context-curve".replace("_", "-"))
        return
    for name in _NOT_HERE:
        if getattr(args, name) or f"evaluation.{name}" in overrides:
            raise UsageError(f"--context-curve cannot be combined with --{name}".replace("_", "-"))
    _settings(args)
    if args.figure is not None:
        if args.figure.suffix not in (".png", ".svg"):
            raise UsageError(f"--figure must end in .png or .svg, not {args.figure.name}")
        if args.figure.exists():
            raise UserError(f"{args.figure} exists already: give --figure another name")
        check_writable(args.figure)


def show_curve(
    args: argparse.Namespace,
    lm: LoadedModel,
    token_file: TokenFile,
    where: Mapping[str, str],
    max_tokens: int | None,
    *,
    own_lanes: bool,
    first: bool,
) -> None:
    """Measure, draw and print; `own_lanes`: the number of lanes was given."""
    from longspan.evaluation import context_curve
    from longspan.evaluation.context_curve import LANES

    config = lm.config.evaluation
    with task("scoring", "tokens") as progress:
        curve = context_curve(
            lm.model,
            token_file,
            tokenizer=lm.tokenizer,
            batch_size=config.batch_size if own_lanes else LANES,
            block_length=config.block_length or lm.config.training.block_length,
            max_tokens=max_tokens,
            device=lm.device,
            progress=progress,
            **_settings(args),
        )
    if not first:
        return
    if args.figure is not None:
        _draw(curve, lm.config.name, args.figure)
    warnings = meaningless(curve.points[-1].nats, curve.unknown, curve.tokens)
    if args.json:
        figure = None if args.figure is None else str(args.figure)
        print(to_json(dict(where) | curve.figures() | {"figure": figure, "warnings": warnings}, indent=2))
        return
    notes = notes_on(lm, curve.unknown, curve.tokens)
    print(_as_text(curve, where, _past(lm), notes, warnings))
    if args.figure is not None:
        print(f"\nfigure: {args.figure}")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, as arguments of `context_curve`."""
    settings: dict[str, Any] = {}
    if args.contexts is not None:
        settings["contexts"] = tuple(_number("contexts", word) for word in args.contexts.split(","))
    if args.curve_tokens is not None:
        settings["scored_tokens"] = _number("curve-tokens", args.curve_tokens)
    return settings


def _number(option: str, word: str) -> int:
    if not word.strip().isdecimal() or len(word) > MOST_DIGITS or int(word) < 1:
        form = "numbers above 0 with commas, as in 16,256" if option == "contexts" else "a number above 0"
        raise UsageError(f"--{option} must be {form}, not '{word}'")
    return int(word)


def _draw(curve: ContextCurve, name: str, path: Path) -> None:
    from longspan.inspection.curve_figure import draw_context_curve

    draw_context_curve(
        [point.context for point in curve.points if point.context is not None],
        [_bits(curve, point) for point in curve.points],
        path,
        title=f"{name}: {_unit(curve)} by the length of the past, {curve.tokens:,} tokens",
        unit=_unit(curve),
    )


def _bits(curve: ContextCurve, point: ContextPoint) -> float:
    """Per byte, or per token if the text is unknown."""
    return curve.bits_per_token(point) if curve.bytes is None else curve.bits_per_byte(point)


def _unit(curve: ContextCurve) -> str:
    return "bits per token" if curve.bytes is None else "bits per byte"


def _past(lm: LoadedModel) -> str:
    text = "every row starts from an empty state; the last column says how many tokens "
    if lm.model.block_invariant:
        return f"{text}a scored token sees"
    return f"{text}are read before a scored one; memory and blocks decide how many of them the model sees"


def _left_out(curve: ContextCurve) -> Iterator[str]:
    """The contexts that were left out, by reason."""
    too_long = [context for context in curve.left_out if not curve.fits_model(context)]
    for_text = [context for context in curve.left_out if curve.fits_model(context)]
    if too_long:
        yield f"{_listed(too_long)}: the model begins a new context every {curve.model_context:,} tokens"
    if for_text:
        longer = "a larger --max-tokens" if curve.beyond else "a longer text"
        yield f"{_listed(for_text)}: more than twice as many tokens are needed: {longer}"


def _listed(contexts: Sequence[int]) -> str:
    return ", ".join(f"{context:,}" for context in contexts)


def _as_text(
    curve: ContextCurve, where: Mapping[str, str], past: str, notes: list[str], warnings: list[str]
) -> str:
    heads = f"{'tokens of the past':<22}{_unit(curve):>16}{'gain':>18}{'from, to':>20}"
    lines, above = [title(where), "", heads], math.nan
    for point in curve.points:
        name, bits = "all" if point.context is None else f"{point.context:,}", _bits(curve, point)
        gain = "" if math.isnan(above) else f"{round(above - bits, 4) + 0.0:.4f}"  # never -0.0000
        seen = f"{point.least:,} to {point.most:,}"
        lines.append(f"{name:<22}{bits:>16.4f}{gain:>18}{seen:>20}")
        above = bits
    size = f"{curve.tokens:,} tokens" + ("" if curve.bytes is None else f", {curve.bytes:,} bytes")
    rows = [
        ("scored", f"{size}, the same for every row: the ends of {lanes(curve.lanes)}"),
        ("past", past),
    ]
    if curve.beyond:
        text = f"the first {curve.read:,} of {curve.read + curve.beyond:,} tokens: see --max-tokens"
        rows.append(("read", text))
    rows.extend(("left out", reason) for reason in _left_out(curve))
    rows.extend(("warning", warning) for warning in warnings)
    rows.extend(("note", note) for note in notes)
    return "\n".join([*lines, "", *(f"{name:<22}{value}" for name, value in rows)])
