"""`longspan attention`: the attention weights of a trained model on a text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli.console import STDOUT, add_json_option, add_quiet_option, show_table
from longspan.cli.paths import as_path, check_writable, expanded
from longspan.cli.plugin_option import add_plugin_option
from longspan.errors import UsageError, UserError
from longspan.files import whole_file
from longspan.json_text import to_json
from longspan.progress import task, tell

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from longspan.inspection import LayerAttention, MeanAttention
    from longspan.language_model import LoadedModel

TOKENS = 16_384
CHARACTERS_PER_TOKEN = 64  # to read no more of a long file than needed; tokens are shorter on average
POSITIONS = 10


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "attention",
        help="attention weights of every layer and head on a text",
        description="Print how far back every head looks: the mean distance, and the distances within which "
        "50% and 90% of its weight lie. The memory is carried from block to block.",
    )
    parser.add_argument("folder", type=expanded, metavar="RUN", help="the run folder")
    parser.add_argument(
        "text",
        nargs="?",
        type=expanded,
        metavar="FILE",
        help="a text file, or - for standard input (default: valid split)",
    )
    parser.add_argument(
        "--out", type=as_path, metavar="FIGURE", help="draw the mean weight over distance into a .png or .svg"
    )
    parser.add_argument(
        "--scale", choices=("linear", "log"), default="linear", help="of the figure (default: linear)"
    )
    add_json_option(parser, "all numbers")
    parser.add_argument(
        "--token",
        type=int,
        metavar="N",
        help=f"show the weights at token N (the first is 0): the {POSITIONS} largest of every head",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        metavar="LIMIT",
        help=f"read at most this many tokens of the text (default: {TOKENS:,})",
    )
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="default: best")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: auto)")
    add_plugin_option(parser)
    add_quiet_option(parser)
    parser.set_defaults(run=run, smaller="use a machine with more memory")


def run(args: argparse.Namespace) -> None:
    _check(args)
    from longspan.language_model import load

    lm = load(args.folder, args.checkpoint, args.device)
    ids, text = _ids(lm, args)
    if not len(ids):
        raise UserError(f"there are no tokens in {text}: attention needs at least one")
    if args.token is not None:
        _at_token(lm, ids, args, text)
    else:
        _over_text(lm, ids, args, text)


def _write(args: argparse.Namespace, text: str, report: dict[str, Any]) -> bool:
    """Write the JSON file before anything is printed, since a closed pipe ends the command.

    Returns whether it was printed in place of the tables.
    """
    if args.json is None:
        return False
    line = to_json({"run": args.folder, "text": text} | report)
    if args.json == STDOUT:
        print(line)
        return True
    with whole_file(args.json) as partial:
        partial.write_text(line + "\n")
    return False


def _check(args: argparse.Namespace) -> None:
    if args.tokens < 1:
        raise UsageError(f"--tokens must be at least 1, not {args.tokens}")
    if args.out is not None and args.token is not None:
        raise UsageError("--out draws the mean over the text: leave out --token")
    if args.out is None and args.scale != "linear":
        raise UsageError("--scale is for the figure: give its file with --out")
    if args.out is not None and args.out.suffix not in (".png", ".svg"):
        raise UsageError(
            f"the figure is a PNG or SVG file: --out must end in .png or .svg, not {args.out.name}"
        )
    for option, path in (("--out", args.out), ("--json", args.json)):
        if path in (None, STDOUT):
            continue
        if path.exists():
            raise UserError(f"{path} exists already: give {option} another name")
        check_writable(path)


def _ids(lm: LoadedModel, args: argparse.Namespace) -> tuple[npt.NDArray[np.int64], str]:
    """The tokens to read, and what they are called."""
    from longspan.evaluation import held_out

    if args.text is None:
        data = lm.config.data
        if not data.corpus:
            raise UserError(
                f"{args.folder} has no corpus of its own: give a text file, or - for standard input"
            )
        valid = held_out(
            data.corpus, "valid", lm.tokenizer, data.tokenizer, tell, binary=data.binary, field=data.field
        )
        return valid.tokens[: args.tokens].astype("int64"), f"the valid split of {Path(data.corpus).name}"
    most = CHARACTERS_PER_TOKEN * args.tokens
    if args.text == "-":
        text, name = sys.stdin.read(most), "standard input"
    else:
        with open(args.text, encoding="utf-8", errors="surrogateescape", newline="") as file:
            text, name = file.read(most), Path(args.text).name
    return lm.tokenizer.encode(text)[: args.tokens].astype("int64"), name


def _over_text(lm: LoadedModel, ids: npt.NDArray[np.int64], args: argparse.Namespace, text: str) -> None:
    from longspan.inspection import draw_attention, mean_attention

    with task("reading", "tokens", len(ids)) as progress:
        mean = mean_attention(lm.model, ids, progress=progress)
    if args.out is not None:
        draw_attention(mean, f"{lm.config.name} on {text}", args.out, args.scale)
    if _write(args, text, mean.as_json()):
        return
    print(f"Attention of {lm.config.name} over {mean.tokens:,} tokens of {text}, distances in tokens")
    show_table(
        ("layer", "module", "head", "mean distance", "50% within", "90% within", "persistent"), _rows(mean)
    )
    if args.out is not None:
        print(f"figure: {args.out}")


def _rows(mean: MeanAttention) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    means_LH, half_LH, most_LH = mean.mean_distance_LH, mean.reach_LH(0.5), mean.reach_LH(0.9)
    for at in mean.heads():
        layer, head = at
        persistent = "-" if mean.persistent_LH is None else f"{mean.persistent_LH[at]:.1%}"
        distances = f"{means_LH[at]:,.1f}", f"{half_LH[at]:,}", f"{most_LH[at]:,}"
        rows.append((str(layer + 1), mean.layers[layer], str(head + 1), *distances, persistent))
    return rows


def _at_token(lm: LoadedModel, ids: npt.NDArray[np.int64], args: argparse.Namespace, text: str) -> None:
    from longspan.inspection import token_attention

    token = args.token
    if not 0 <= token < len(ids):
        raise UserError(f"there is no token {token} in the first {len(ids):,} of {text} (see --tokens)")
    with task(f"reading up to token {token:,}"):
        layers = token_attention(lm.model, ids, token)
    if not layers:
        raise UserError("this model has no attention: there are no weights to show")
    pieces = lm.tokenizer.pieces()
    texts = [_shown(pieces[one]) for one in ids[: token + 1].tolist()]
    report, rows = [], list[tuple[str, ...]]()
    for number, layer in enumerate(layers, 1):
        heads = [_head(layer, head, texts) for head in range(len(layer.weights_HTW))]
        report.append({"module": layer.name, "heads": heads})
        for head, one in enumerate(heads, 1):
            where = str(number), str(head)
            rows += [
                (*where, f"{at['weight']:.4f}", str(at["distance"]), str(at["position"]), at["text"])
                for at in one["largest"]
            ]
            if one["persistent"] is not None:
                rows.append((*where, f"{one['persistent']:.4f}", "-", "-", "all persistent vectors"))
    if _write(args, text, {"token": token, "layers": report}):
        return
    print(f"Attention of {lm.config.name} at token {token:,} of {text}, {texts[-1]}")
    show_table(("layer", "head", "weight", "distance", "position", "text"), rows)


def _head(layer: LayerAttention, head: int, texts: list[str]) -> dict[str, Any]:
    """The weights of one head at the last of these tokens, and the largest of them."""
    weights_W = layer.weights_HTW[head, 0]
    values, distances = weights_W.topk(min(POSITIONS, len(weights_W)))
    largest = []
    for weight, distance in zip(values.tolist(), distances.tolist(), strict=True):
        position = len(texts) - 1 - distance
        text = texts[position] if position >= 0 else "before the text"  # a memory of zeros
        if weight > 0:
            largest.append({"weight": weight, "distance": distance, "position": position, "text": text})
    persistent = None if layer.persistent_HTP is None else float(layer.persistent_HTP[head, 0].sum())
    return {"largest": largest, "weights": weights_W.tolist(), "persistent": persistent}


def _shown(piece: bytes) -> str:
    """The text of a token, with quotes and escapes: a line end is '\\n'."""
    return repr(piece.decode("utf-8", "backslashreplace"))
