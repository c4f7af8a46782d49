"""`longspan spans`: the learned span of every head of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from longspan.cli.console import add_quiet_option, say
from longspan.cli.paths import check_parent, expanded
from longspan.cli.plugin_option import add_plugin_option
from longspan.errors import UsageError, UserError
from longspan.progress import task

if TYPE_CHECKING:
    from longspan.runs import RunFolder


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "spans",
        help="show the learned span of every head",
        description="Print the learned spans, and draw them with their history as a picture. With --text: "
        "the spans of every head at every token of a text, if spans depend on the input.",
    )
    parser.add_argument("folder", type=expanded, metavar="RUN", help="the run folder")
    parser.add_argument(
        "--out", type=expanded, metavar="FILE.png", help="file of the picture (default: RUN/spans.png)"
    )
    parser.add_argument(
        "--text", type=expanded, metavar="FILE", help="read this text, and show the spans at its tokens"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the spans of every head")
    parser.add_argument(
        "--checkpoint", choices=("best", "last"), default="best", help="weights for --text (default: best)"
    )
    parser.add_argument(
        "--device", default="auto", help="where --text is read: cpu, cuda, ... (default: auto)"
    )
    parser.add_argument(
        "--freeze",
        type=expanded,
        metavar="NEW_RUN",
        help="make a new run from the best weights, with the learned spans as fixed windows",
    )
    add_plugin_option(parser)
    add_quiet_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from longspan.runs import RunFolder

    folder = RunFolder.open(Path(args.folder))
    picture = Path(args.out) if args.out else None
    if picture is not None and picture.suffix != ".png":
        raise UsageError(f"the picture is a PNG file: --out must end in .png, not {picture.name}")
    if picture is not None and picture.exists():
        raise UserError(f"{picture} exists already: give --out another name")
    if args.text and args.freeze:
        raise UsageError("--text shows spans and --freeze makes a run: give one of them")
    if args.freeze:  # before drawing: it may fail
        freeze(folder, Path(args.freeze))
    if args.text:
        show_over_text(args, picture or folder.path / "text-spans.png")
    else:
        show(folder, picture, as_json=args.json)


def freeze(folder: RunFolder, out: Path) -> None:
    from longspan.runs.freeze_spans import freeze_spans

    check_parent(out)
    freeze_spans(folder, out)
    print(f"{out}: its windows are in config.toml; try 'longspan eval {quote(str(out))}'")


def show_over_text(args: argparse.Namespace, picture: Path) -> None:
    """Print and draw the spans of every head at every token of a text."""
    from longspan.inspection.token_spans import draw_token_spans, token_spans, token_spans_as_text
    from longspan.language_model import load

    if Path(args.text).exists() and not Path(args.text).is_file() and not Path(args.text).is_dir():
        raise UserError(f"{args.text} is not a regular file: copy its text to one first")
    try:
        text = Path(args.text).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as problem:
        raise UserError(f"cannot read {args.text}: {problem.strerror}") from None
    lm = load(args.folder, args.checkpoint, args.device)
    if not text:
        raise UserError(f"there are no spans to show: {args.text} is empty")
    ids, all_pieces = lm.tokenizer.encode(text).astype("int64"), lm.tokenizer.pieces()
    with task(f"reading {args.text}", "tokens", len(ids)) as progress:
        spans_LHT = token_spans(lm.model, ids, progress=progress)
    pieces = [all_pieces[token] for token in ids.tolist()]
    with task("drawing"):
        draw_token_spans(lm.config.name, pieces, spans_LHT, picture)
    if args.json:
        tokens = [piece.decode("utf-8", "replace") for piece in pieces]
        fields = {"run": args.folder, "checkpoint": args.checkpoint, "text": args.text}
        print(json.dumps(fields | {"tokens": tokens, "spans": spans_LHT.tolist(), "picture": str(picture)}))
        return
    print(token_spans_as_text(pieces, spans_LHT))
    print(f"\npicture: {picture}")


def show(folder: RunFolder, picture: Path | None = None, *, as_json: bool = False) -> None:
    """Print the spans of a run and draw them, by default into its own folder."""
    from longspan.inspection import draw_spans, read_spans, spans_as_text

    history = read_spans(folder)
    drawn: Path | None = picture or folder.path / "spans.png"
    assert drawn is not None
    try:
        draw_spans(history, drawn)
    except OSError as problem:
        if picture is not None:
            raise
        say(
            f"longspan: there is no picture, since {drawn} cannot be written ({problem.strerror}): give --out"
        )
        drawn = None
    if as_json:
        fields = {"run": str(folder.path), "step": int(history.steps_N[-1]), "limit": history.limit}
        path = None if drawn is None else str(drawn)
        print(json.dumps(fields | {"spans": history.last_LH.tolist(), "picture": path}))
        return
    print(spans_as_text(history))
    if history.dynamic:
        print(
            "\nThese are means over a training block: --text FILE shows the spans at every token of a text."
        )
    if drawn is not None:
        print(f"\npicture: {drawn}")
