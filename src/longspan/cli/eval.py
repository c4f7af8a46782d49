"""`longspan eval`: measure a trained model on held-out text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from longspan.cli.overrides import split_overrides

if TYPE_CHECKING:
    from longspan.evaluation import Score

SHORT = ("protocol", "batch_size", "block_length")  # --protocol is short for --evaluation.protocol


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="bits per byte, bits per character and perplexity of a run",
        description="Measure a trained model. Dotted options change the run's own settings, for example "
        "--model.span.memory full.",
    )
    parser.add_argument("folder", metavar="RUN", help="the run folder")
    parser.add_argument("--split", default="test", help="train, valid or test (default: test)")
    parser.add_argument("--data", metavar="CORPUS", help="another corpus, file or folder than the run's own")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="default: best")
    parser.add_argument("--protocol", help="every-token, adaptive-span, transformer-xl or sha-rnn")
    parser.add_argument("--batch-size", metavar="N", help="lanes the text is cut into")
    parser.add_argument("--block-length", metavar="N", help="tokens per block (default: as in training)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="score only the first N tokens")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, accepts_overrides=True)


def run(args: argparse.Namespace) -> None:
    from longspan.evaluation import evaluate, held_out
    from longspan.language_model import load

    overrides = dict(split_overrides(args.overrides))
    for name in SHORT:
        if (value := getattr(args, name)) is not None:
            overrides[f"evaluation.{name}"] = value
    lm = load(args.folder, args.checkpoint, args.device, overrides)
    corpus = args.data or lm.config.data.corpus
    with held_out(corpus, args.split, lm.tokenizer, _log) as token_file, _progress() as progress:
        score = evaluate(
            lm.model,
            token_file,
            tokenizer=lm.tokenizer,
            config=lm.config.evaluation,
            block_length=lm.config.training.block_length,
            max_tokens=args.max_tokens,
            device=lm.device,
            progress=progress,
        )
    where = {"run": args.folder, "checkpoint": args.checkpoint, "corpus": corpus, "split": args.split}
    print(_as_json(score, where) if args.json else _as_text(score, where))


def _as_text(score: Score, where: dict[str, str]) -> str:
    rows = [
        ("bits per byte", f"{score.bits_per_byte:.4f}"),
        ("bits per character", f"{score.bits_per_character:.4f}"),
        ("bits per token", f"{score.bits_per_token:.4f}"),
        ("perplexity per token", f"{score.perplexity:,.3f}"),
        ("loss", f"{score.loss:.4f} nats per token"),
        ("tokens scored", f"{score.tokens:,}"),
        ("tokens skipped", f"{score.skipped:,} ({score.skipped_because})"),
        ("bytes", f"{score.bytes:,}"),
        ("characters", f"{score.characters:,}"),
        ("protocol", f"{score.protocol}, {score.batch_size} lanes, blocks of {score.block_length}"),
    ]
    if score.divisor != score.tokens:
        rows.append(("", f"per token means per {score.divisor:,}, as this protocol counts"))
    title = "{run} ({checkpoint} checkpoint) on the {split} split of {corpus}".format(**where)
    return "\n".join([title, "", *(f"{name:<22}{value}" for name, value in rows)])


def _as_json(score: Score, where: dict[str, str]) -> str:
    figures = ("bits_per_byte", "bits_per_character", "bits_per_token", "perplexity", "loss")
    derived = {name: getattr(score, name) for name in figures}
    return json.dumps(where | derived | dataclasses.asdict(score), indent=2)


def _log(line: str) -> None:
    print(line, file=sys.stderr)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """How far the evaluation is: a live line on a terminal, a plain line every tenth in a log."""
    if not sys.stderr.isatty():
        yield _Tenths()
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("scoring"), MofNCompleteColumn(), TextColumn("tokens, left"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("scoring", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _Tenths:
    def __init__(self) -> None:
        self._said = 0

    def __call__(self, done: int, total: int) -> None:
        if (tenths := 10 * done // total) > self._said:
            self._said = tenths
            _log(f"{done:,} of {total:,} tokens")
