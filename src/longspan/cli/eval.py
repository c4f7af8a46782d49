"""`longspan eval`: evaluate a trained model on held-out text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli.console import add_quiet_option, say
from longspan.cli.eval_curve import add_curve_options, check_curve, show_curve
from longspan.cli.eval_dynamic import add_dynamic_options, check_dynamic, show_dynamic
from longspan.cli.figures import lanes, meaningless, perplexity
from longspan.cli.overrides import split_overrides
from longspan.cli.paths import expanded
from longspan.cli.plugin_option import add_plugin_option
from longspan.cli.scoring import notes_on, title
from longspan.errors import UsageError, UserError, usage_errors
from longspan.json_text import to_json
from longspan.progress import task, tell

if TYPE_CHECKING:
    from longspan.evaluation import Score

# --protocol is short for --evaluation.protocol, and so on.
SHORT = ("protocol", "batch_size", "block_length", "max_tokens")
OF_DATA = ("data.field", "data.binary")
HELD_OUT = ("valid", "test")
OF_TEXT = ("bits per byte", "bits per character", "perplexity per word", "bytes", "characters", "words")
MAX_TOKENS = "evaluation.max_tokens"  # the run's own limit is for evaluation during training
BATCH_SIZE = "evaluation.batch_size"
TIMEOUT_SECONDS = 600  # how long the processes of torchrun wait for each other


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="bits per byte, bits per character and perplexity of a run",
        description="Score a trained model on the test split of its corpus, on another split, or on a whole "
        "file. The output says what was scored. Dotted options change the run's settings of the model and "
        "the evaluation, for example --model.span.memory full, and --data.field and --data.binary how a text "
        "of --data is read. The processes of torchrun divide the text.",
    )
    parser.add_argument("folder", type=expanded, metavar="RUN", help="the run folder")
    parser.add_argument(
        "--data",
        metavar="CORPUS",
        help="a file or - (standard input), which is scored as a whole; a folder, a glob or a named corpus "
        "(default: the run's own corpus)",
    )
    parser.add_argument(
        "--binary", action="store_true", help="the text of --data may be any bytes: --data.binary true"
    )
    parser.add_argument(
        "--split",
        help="train, valid or test; a file is split as training would split it "
        "(default: the whole file with --data FILE, else test)",
    )
    parser.add_argument(
        "--no-memory", action="store_true", help="start every block from an empty state: no context before it"
    )
    parser.add_argument(
        "--by-position",
        action="store_true",
        help="also print the loss by position in the block; with --json every position",
    )
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="default: best")
    parser.add_argument("--protocol", help="every-token, adaptive-span, transformer-xl, sha-rnn or fairseq")
    parser.add_argument("--batch-size", metavar="N", help="lanes that the text is split into")
    parser.add_argument(
        "--block-length",
        metavar="N",
        help="tokens per block (default: evaluation.block-length, else as in training)",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        help="score only the first N tokens; the context curve reads no more than 1048576 unless given",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: auto)")
    add_curve_options(parser)
    add_dynamic_options(parser)
    add_plugin_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_quiet_option(parser)
    parser.set_defaults(
        run=run, accepts_overrides=True, smaller="give a smaller --batch-size or --block-length"
    )


def run(args: argparse.Namespace) -> None:
    from longspan import distributed
    from longspan.evaluation import check_split
    from longspan.runs import pick_device

    if args.data == "":  # most likely an unset shell variable
        raise UsageError("--data is empty: give it a value or leave it out")
    if args.split is not None:
        with usage_errors():
            check_split(args.split)
    overrides = _overrides(args)
    check_curve(args, overrides)
    check_dynamic(args)
    with distributed.joined(pick_device(args.device), TIMEOUT_SECONDS):
        _score(args, overrides, first=distributed.is_first())


def _score(args: argparse.Namespace, overrides: dict[str, str], *, first: bool) -> None:
    """Every rank scores its lanes; the `first` one prints."""
    from longspan.data import corpora
    from longspan.data.corpus import WHOLE
    from longspan.evaluation import evaluate, has_changed, held_out, split_to_score
    from longspan.language_model import load
    from longspan.runs import RunFolder

    note = say if first else _quiet
    lm = load(args.folder, args.checkpoint, args.device, overrides)
    corpus = args.data or lm.config.data.corpus
    if not corpus:
        raise UserError(f"{args.folder} has no corpus of its own: give the text with --data")
    split = split_to_score(args.split, args.data)
    if not args.data and split in HELD_OUT and has_changed(RunFolder.open(Path(args.folder)), note):
        note(
            f"longspan: the text of {corpus} has changed since the run began: "
            f"its {split} split may contain text that the model was trained on"
        )
    if split == WHOLE and corpora.anchored(corpus) == corpora.anchored(lm.config.data.corpus):
        note(f"longspan: the model was trained on a part of {corpus}: --split test scores only held-out text")
    data = lm.config.data
    token_file = held_out(
        corpus, split, lm.tokenizer, data.tokenizer, tell, binary=data.binary, field=data.field
    )
    where = {"run": args.folder, "checkpoint": args.checkpoint, "corpus": corpus, "split": split}
    max_tokens = lm.config.evaluation.max_tokens if MAX_TOKENS in overrides else None
    if args.context_curve:
        own_lanes = BATCH_SIZE in overrides
        show_curve(args, lm, token_file, where, max_tokens, own_lanes=own_lanes, first=first)
        return
    if args.dynamic is not None:
        show_dynamic(args, lm, token_file, where, max_tokens, own_lanes=BATCH_SIZE in overrides)
        return
    with task("scoring", "tokens") as progress:
        score = evaluate(
            lm.model,
            token_file,
            tokenizer=lm.tokenizer,
            config=lm.config.evaluation,
            block_length=lm.config.training.block_length,
            max_tokens=max_tokens,
            memory=not args.no_memory,
            by_position=args.by_position,
            device=lm.device,
            progress=progress,
        )
    if not first:
        return
    warnings = meaningless(score.nats, score.unknown, score.tokens)
    if args.json:
        shares = {"unknown_share": score.unknown / score.tokens, "warnings": warnings}
        print(to_json(where | score.figures() | shares, indent=2))
    else:
        notes = notes_on(lm, score.unknown, score.tokens)
        print(_as_text(score, where, notes, warnings))


def _overrides(args: argparse.Namespace) -> dict[str, str]:
    """The dotted options, and the short ones under their dotted names."""
    overrides: dict[str, str] = {}
    for name, value in split_overrides(args.overrides):
        name = name.replace("-", "_")
        known = name in OF_DATA or name.startswith(("model.", "evaluation."))
        if not known or name == "evaluation.max_tokens_final":
            raise UsageError(
                f"'--{name.replace('_', '-')}' has no effect on eval: use --model.* and --evaluation.*, and "
                "--max-tokens to limit the tokens"
            )
        if name == "model.architecture":
            raise UsageError("--model.architecture cannot be changed: the weights belong to one architecture")
        overrides[name] = value
    if args.binary:
        overrides["data.binary"] = "true"
    for short in SHORT:
        value, name = getattr(args, short), f"evaluation.{short}"
        if value is not None and name in overrides:
            raise UsageError(f"--{short} and --{name} are the same option: give one".replace("_", "-"))
        if value is not None:
            overrides[name] = value
    if args.data is None and (of_data := next((name for name in OF_DATA if name in overrides), None)):
        raise UsageError(f"--{of_data} says how another text is read: give that with --data")
    return overrides


def _as_text(score: Score, where: dict[str, str], notes: list[str], warnings: list[str]) -> str:
    from longspan.evaluation.by_position import in_powers_of_two

    rows = [
        ("bits per byte", f"{score.bits_per_byte:.4f}"),
        ("bits per character", f"{score.bits_per_character:.4f}"),
        ("bits per token", f"{score.bits_per_token:.4f}"),
        ("perplexity per token", perplexity(score.perplexity)),
        ("perplexity per word", perplexity(score.perplexity_per_word)),
        ("loss", f"{score.loss:.4f} nats per token"),
        ("tokens scored", f"{score.tokens:,}"),
        ("tokens skipped", f"{score.skipped:,} ({score.skipped_because})"),
        ("bytes", _count(score.bytes)),
        ("characters", _count(score.characters)),
        ("words", f"{_count(score.words)}, including ends of lines"),
        ("protocol", f"{score.protocol}, {lanes(score.batch_size)}, blocks of {score.block_length}"),
    ]
    if score.bytes is None:  # the text of the tokens is unknown
        rows = [row for row in rows if row[0] not in OF_TEXT]
    if score.divisor != score.tokens:
        rows.append(("", f"per token: this protocol divides by {score.divisor:,}"))
    if not score.memory:
        rows.append(("memory", "none: every block starts from an empty state"))
    rows.extend(("warning", warning) for warning in warnings)
    rows.extend(("note", note) for note in notes)
    lines = [title(where), "", *(f"{name:<22}{value}" for name, value in rows)]
    if score.by_position is not None:
        lines += ["", f"{'position in block':<22}{'tokens':>14}{'nats per token':>18}"]
        for row in in_powers_of_two(score.by_position):
            positions = f"{row.first}" if row.first == row.last else f"{row.first} to {row.last}"
            lines.append(f"{positions:<22}{row.tokens:>14,}{row.loss:>18.4f}")
    return "\n".join(lines)


def _quiet(line: str) -> None:
    pass


def _count(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"
