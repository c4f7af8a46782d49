"""`longspan eval --dynamic`: weights that follow the text, beside the fixed ones."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.cli.figures import lanes, meaningless, perplexity
from longspan.cli.scoring import notes_on, title
from longspan.errors import UsageError, UserError
from longspan.json_text import to_json
from longspan.progress import task, tell

if TYPE_CHECKING:
    from longspan.data import TokenFile
    from longspan.evaluation import DynamicScore, Score
    from longspan.language_model import LoadedModel

_ONLY_HERE = ("dynamic_rate", "dynamic_decay")
_NOT_HERE = ("no_memory", "by_position")


def add_dynamic_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dynamic",
        choices=("sgd", "rms"),
        help="also score with dynamic evaluation: a gradient step on every block after it was scored; rms "
        "scales it by the gradients of the training text. One lane unless --batch-size is given",
    )
    parser.add_argument(
        "--dynamic-rate",
        metavar="RATE",
        help="learning rate of these steps (default: 0.05 for sgd, 1e-4 for rms)",
    )
    parser.add_argument(
        "--dynamic-decay",
        metavar="DECAY",
        help="how fast weights return to the trained ones, 0 to 1 (default: 0 for sgd, 0.001 for rms)",
    )


def check_dynamic(args: argparse.Namespace) -> None:
    """Raise for options that contradict each other, before anything is loaded."""
    from longspan import distributed

    if args.dynamic is None:
        for name in _ONLY_HERE:
            if getattr(args, name) is not None:
                raise UsageError(f"--{name} is for dynamic evaluation: give --dynamic".replace("_", "-"))
        return
    for name in _NOT_HERE:
        if getattr(args, name):
            raise UsageError(f"--dynamic cannot be combined with --{name}".replace("_", "-"))
    if distributed.launched():
        raise UserError(
            "--dynamic is for one process, since every block changes the weights: leave out torchrun"
        )
    _number(args, "dynamic_rate", math.inf)
    _number(args, "dynamic_decay", 1.0)


def show_dynamic(
    args: argparse.Namespace,
    lm: LoadedModel,
    token_file: TokenFile,
    where: Mapping[str, str],
    max_tokens: int | None,
    *,
    own_lanes: bool,
) -> None:
    """Measure and print; `own_lanes`: the number of lanes was given."""
    from longspan.evaluation import dynamic_evaluation

    config = lm.config.evaluation
    training = _training_text(Path(args.folder), lm) if args.dynamic == "rms" else None
    with task("scoring", "tokens") as progress:
        found = dynamic_evaluation(
            lm.model,
            token_file,
            tokenizer=lm.tokenizer,
            config=config if own_lanes else replace(config, batch_size=1),
            block_length=lm.config.training.block_length,
            rule=args.dynamic,
            rate=_number(args, "dynamic_rate", math.inf),
            decay=_number(args, "dynamic_decay", 1.0),
            training=training,
            max_tokens=max_tokens,
            device=lm.device,
            progress=progress,
        )
    warnings = meaningless(found.dynamic.nats, found.dynamic.unknown, found.dynamic.tokens)
    if args.json:
        print(to_json(dict(where) | found.figures() | {"warnings": warnings}, indent=2))
    else:
        notes = notes_on(lm, found.static.unknown, found.static.tokens)
        if found.steps == 1:
            notes.append("no step came before a scored token: use a smaller --block-length or --batch-size")
        print(_as_text(found, where, notes, warnings))


def _training_text(folder: Path, lm: LoadedModel) -> TokenFile:
    from longspan.evaluation import held_out
    from longspan.runs import RunFolder

    data = RunFolder.open(folder).config.data  # as it was trained: options say how the text of --data is read
    if not data.corpus:
        raise UserError("--dynamic rms needs the training text, and the run has no corpus: use --dynamic sgd")
    try:
        return held_out(
            data.corpus, "train", lm.tokenizer, data.tokenizer, tell, binary=data.binary, field=data.field
        )
    except UserError as problem:
        raise UserError(f"--dynamic rms needs the training text: {problem}; or use --dynamic sgd") from None


def _number(args: argparse.Namespace, name: str, most: float) -> float | None:
    text = getattr(args, name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value <= most and math.isfinite(value)):
        form = "a number of at least 0" if most == math.inf else f"a number from 0 to {most:g}"
        raise UsageError(f"--{name.replace('_', '-')} must be {form}, not '{text}'")
    return value


def _as_text(found: DynamicScore, where: Mapping[str, str], notes: list[str], warnings: list[str]) -> str:
    both = (found.static, found.dynamic)
    seconds = (found.static_seconds, found.dynamic_seconds)
    rows: list[tuple[str, list[str]]] = []
    if found.static.bytes is not None:
        rows.append(("bits per byte", [f"{score.bits_per_byte:.4f}" for score in both]))
    rows += [
        ("bits per token", [f"{score.bits_per_token:.4f}" for score in both]),
        ("perplexity per token", [perplexity(score.perplexity) for score in both]),
    ]
    size, unit = _size(found.static)
    rows += [
        (f"microseconds per {unit}", [f"{1e6 * spent / size:.1f}" for spent in seconds]),
        ("seconds", [f"{spent:.1f}" for spent in seconds]),
    ]
    lines = [title(where), "", f"{'':<24}{'static':>14}{'dynamic':>14}"]
    lines += [f"{name:<24}{static:>14}{dynamic:>14}" for name, (static, dynamic) in rows]
    score = found.static
    facts = [
        ("rule", f"{found.rule}, rate {found.rate:g}, decay {found.decay:g}, {found.steps:,} steps"),
        ("protocol", f"{score.protocol}, {lanes(score.batch_size)}, blocks of {score.block_length}"),
        ("tokens scored", f"{score.tokens:,}, each before the step on it"),
        ("tokens skipped", f"{score.skipped:,} ({score.skipped_because})"),
    ]
    if score.divisor != score.tokens:
        facts.append(("", f"per token: this protocol divides by {score.divisor:,}"))
    if found.rule == "rms":
        facts.append(("statistics", f"{found.statistics_seconds:.1f} s for gradients of the training text"))
    facts.extend(("warning", warning) for warning in warnings)
    facts.extend(("note", note) for note in notes)
    return "\n".join([*lines, "", *(f"{name:<24}{value}" for name, value in facts)])


def _size(score: Score) -> tuple[int, str]:
    return (score.tokens, "token") if score.bytes is None else (max(score.bytes, 1), "byte")
