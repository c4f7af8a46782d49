"""`longspan inspect`: what every token of a text costs, and how far back each head looks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli.console import add_quiet_option, show_table
from longspan.cli.paths import as_path, check_writable, expanded
from longspan.cli.plugin_option import add_plugin_option
from longspan.cli.text_input import TextInput, check_file
from longspan.errors import UsageError, UserError
from longspan.json_text import to_json
from longspan.progress import task
from longspan.terminal import console, visible

if TYPE_CHECKING:
    from longspan.inspection.surprise import Block, Totals
    from longspan.inspection.surprising_parts import SurprisingPart
    from longspan.language_model import LoadedModel

TOKENS = 1_000
ATTENTION_TOKENS = 16_384
LARGEST = 3  # positions of every head on the page
POSITIONS = 10  # of every head with --token
MOST_TOKENS = 100_000  # that are shown
MOST_HEADS = 200_000  # pairs of a token and a head on the page: the later tokens come without attention
PARTS = 3  # of the most surprising ones, in the terminal
SHADES = ("", "on #3b2f0b", "on #6b4a00", "on #8f3d00", "on #a31621")
BITS_OF_SHADES = (1.0, 2.5, 5.0, 8.0)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="bits of every token of a text, and how far back heads look",
        description="Print a text shaded by the bits of its tokens, its bits per byte, and for every layer "
        "and head the mean distance of attention and the distance within which 90% of the weight lies. "
        "A text of any size is read in constant memory.",
    )
    parser.add_argument("folder", type=expanded, metavar="RUN", help="the run folder")
    parser.add_argument("text", type=expanded, metavar="FILE", help="a text file, or - for standard input")
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        metavar="N",
        help=f"show the first N tokens, in the terminal and on the page (default: {TOKENS:,}, at most "
        f"{MOST_TOKENS:,}); totals and the most surprising parts are of all of the text",
    )
    parser.add_argument(
        "--attention-tokens",
        type=int,
        default=ATTENTION_TOKENS,
        metavar="N",
        help=f"measure attention over the first N tokens (default: {ATTENTION_TOKENS:,}; 0: not at all)",
    )
    parser.add_argument("--token", type=int, metavar="N", help="show the weights at token N (the first is 0)")
    parser.add_argument("--json", action="store_true", help="print JSON lines: every token, then the totals")
    parser.add_argument("--html", type=as_path, metavar="FILE", help="also write a page, to a new file")
    add_quiet_option(parser)
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="default: best")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: auto)")
    add_plugin_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    _check(args)
    from longspan.inspection.surprise import Totals, inspect_blocks
    from longspan.inspection.surprising_parts import SurprisingParts
    from longspan.language_model import load

    lm = load(args.folder, args.checkpoint, args.device)
    totals, parts = Totals(), SurprisingParts()
    most = max(LARGEST if args.html else 0, POSITIONS if args.token is not None else 0)
    measured = max(args.attention_tokens, 0 if args.token is None else args.token + 1)
    picked = _Picked(args, lm.tokenizer.pieces())
    with task(f"inspecting {args.text}", "bytes", prints=args.json) as progress:
        text = TextInput(args.text, lm.tokenizer, progress)
        start = lm.read("")
        for block in inspect_blocks(
            lm.model, text.chunks(), start, totals, attention_tokens=measured, largest=most
        ):
            parts.add(block)
            picked.add(block)
            text.tell(totals.tokens)
    shown, chosen = picked.shown, picked.chosen
    if not totals.tokens:
        raise UserError(f"there are no tokens in {text.name}: give a text with at least one")
    if args.token is not None and chosen is None:
        raise UserError(f"there is no token {args.token}: {text.name} has {totals.tokens:,}")
    facts = _facts(args, lm, text, totals) | {"surprising": [_part(part, lm) for part in parts]}
    if args.html:
        _write_page(args.html, facts, shown)
    if args.json:
        print(to_json({"kind": "total", **facts} | ({"chosen": chosen} if chosen else {})))
        return
    _show_text(shown)
    _show_totals(facts, chosen)
    if args.html:
        print(f"page: {args.html}")


def _check(args: argparse.Namespace) -> None:
    for option, value in (("--tokens", args.tokens), ("--attention-tokens", args.attention_tokens)):
        if value < 0:
            raise UsageError(f"{option} must be 0 or more, not {value}")
    if args.tokens > MOST_TOKENS:
        raise UsageError(f"--tokens must be at most {MOST_TOKENS:,}, not {args.tokens:,}: --json has all")
    if args.token is not None and args.token < 0:
        raise UsageError(f"--token must be 0 or more, not {args.token}")
    if args.html is not None:
        if args.html.exists():
            raise UserError(f"{args.html} exists already: give --html another name")
        check_writable(args.html)
        if not Path(args.html).absolute().parent.is_dir():
            raise UserError(f"there is no folder {args.html.parent}: create it, or choose another --html")
    check_file(args.text)


class _Picked:
    """The tokens to show, and the one with `--token`; with `--json` every token is printed at once."""

    def __init__(self, args: argparse.Namespace, pieces: list[bytes]) -> None:
        self.shown: list[dict[str, Any]] = []
        self.chosen: dict[str, Any] | None = None
        self._args, self._pieces = args, pieces

    def add(self, block: Block) -> None:
        args, first, last = self._args, block.first, block.first + len(block.ids)
        if args.json:
            for number in range(first, last):
                print(to_json(self._token(block, number, attention=True)))
        heads = sum(len(layer.mean_HT) for layer in block.layers)
        for number in range(first, min(last, args.tokens)):
            with_heads = args.html is not None and number * heads < MOST_HEADS and heads > 0
            token = self._token(block, number, attention=with_heads)
            self.shown.append(token | {"top": _top(block, number - first, LARGEST)} if with_heads else token)
        if args.token is not None and first <= args.token < last:
            token = self._token(block, args.token, attention=True)
            self.chosen = token | {"top": _top(block, args.token - first, POSITIONS)}

    def _token(self, block: Block, number: int, *, attention: bool) -> dict[str, Any]:
        place = number - block.first
        token_id = block.ids[place]
        token: dict[str, Any] = {
            "kind": "token",
            "token": number,
            "id": token_id,
            "text": self._pieces[token_id].decode("utf-8", "backslashreplace"),
            "bits": block.bits[place],
        }
        if block.layers and attention:
            token["mean_distance"] = [_rounded(layer.mean_HT[:, place].tolist()) for layer in block.layers]
            token["reach_90"] = [layer.reach_HT[:, place].tolist() for layer in block.layers]
        return token


def _part(part: SurprisingPart, lm: LoadedModel) -> dict[str, Any]:
    text = lm.tokenizer.decode(part.ids)
    return {"token": part.first, "tokens": len(part.ids), "bits_per_token": part.bits_per_token, "text": text}


def _top(block: Block, place: int, most: int) -> list[list[list[tuple[int, float]]]]:
    """For every layer and head the distances with the largest weights."""
    return [
        [
            [(d, w) for d, w in zip(distances, _rounded(weights), strict=True) if w > 0][:most]
            for distances, weights in zip(
                layer.top_HTK[:, place].tolist(), layer.top_weights_HTK[:, place].tolist(), strict=True
            )
        ]
        for layer in block.layers
    ]


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _facts(args: argparse.Namespace, lm: LoadedModel, text: TextInput, totals: Totals) -> dict[str, Any]:
    known = lm.tokenizer.knows_text and text.bytes > 0
    mean = totals.attention()
    layers = [] if mean is None else mean.as_json()["layers"]
    for layer in layers:
        for head in layer["heads"]:
            del head["weights"]
    return {
        "run": str(args.folder),
        "text": text.name,
        "bytes": text.bytes,
        "tokens": totals.tokens,
        "bits": totals.bits,
        "bits_per_token": totals.bits / totals.tokens,
        "bits_per_byte": totals.bits / text.bytes if known else None,
        "attention_tokens": totals.attention_tokens if layers else 0,
        "layers": layers,
    }


def _show_text(tokens: list[dict[str, Any]]) -> None:
    from rich.text import Text

    shaded = Text()
    for token in tokens:
        shade = SHADES[sum(token["bits"] >= bits for bits in BITS_OF_SHADES)]
        shaded.append(visible(token["text"]), shade)
    console().print(shaded, soft_wrap=True)


def _show_totals(facts: dict[str, Any], chosen: dict[str, Any] | None) -> None:
    per_byte = facts["bits_per_byte"]
    print(f"\ntext           {facts['text']}: {facts['bytes']:,} bytes, {facts['tokens']:,} tokens")
    if per_byte is not None:
        print(f"bits per byte  {per_byte:.4f}")
    print(f"bits per token {facts['bits_per_token']:.4f}")
    if facts["layers"]:
        print(f"attention over the first {facts['attention_tokens']:,} tokens, distances in tokens")
        rows = [
            (str(number), str(head), _distance(one["mean_distance"]), f"{one['reach_90']:,}")
            for number, layer in enumerate(facts["layers"], 1)
            for head, one in enumerate(layer["heads"], 1)
        ]
        show_table(("layer", "head", "mean distance", "90% within"), rows)
    if facts["surprising"]:
        print(f"most surprising parts, of {facts['surprising'][0]['tokens']} tokens each")
        parts = [
            (f"{part['token']:,}", f"{part['bits_per_token']:.3f}", repr(part["text"]))
            for part in facts["surprising"][:PARTS]
        ]
        show_table(("from token", "bits per token", "text"), parts)
    if chosen is not None:
        print(f"token {chosen['token']:,}, {chosen['text']!r}: {chosen['bits']:.3f} bits")
        weights = [
            (str(layer), str(head), f"{weight:.4f}", str(distance), str(chosen["token"] - distance))
            for layer, heads in enumerate(chosen["top"], 1)
            for head, top in enumerate(heads, 1)
            for distance, weight in top
        ]
        show_table(("layer", "head", "weight", "distance", "position"), weights)


def _distance(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _write_page(path: Path, facts: dict[str, Any], tokens: list[dict[str, Any]]) -> None:
    from longspan.files import whole_file
    from longspan.inspection.report.text_page import text_page

    with whole_file(path) as partial:
        partial.write_text(text_page(facts, tokens), encoding="utf-8")
