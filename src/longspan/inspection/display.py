"""HTML for notebooks: a text shaded by surprise, spans as a heat table, facts about a model.

Everything is inline and nothing is loaded. Text has the colour of its surroundings and shades are
transparent, so it can be read on a light and on a dark page. All text is escaped.
"""

from __future__ import annotations

import codecs
import html
import math
from collections.abc import Iterable, Sequence

from longspan.terminal import visible

MOST_TOKENS = 1_000  # that are shown of a text
MOST_LAYERS, MOST_HEADS = 48, 32
_STRONGEST_BITS = 12.0
_SURPRISE, _SPAN = "224,89,42", "32,144,140"  # red, green, blue
_CELL = "padding:2px 8px;text-align:right;border:none;color:inherit"
_HEAD = f"{_CELL};font-weight:600;background:transparent"


class Spans(list[list[float]]):
    """How many tokens each head of each layer looks back: a list of lists, drawn by notebooks."""

    limit: float  # the largest span that a head may have

    def __init__(self, spans: Iterable[Iterable[float]], limit: float) -> None:
        super().__init__([*map(list, spans)])
        self.limit = limit

    def _repr_html_(self) -> str:
        return spans_html(self, self.limit)


def text_html(pieces: Sequence[bytes], bits: Sequence[float], note: str) -> str:
    """The text of some tokens, each on a shade of its bits, under a note."""
    spans = [
        f'<span title="{one:.2f} bits" style="{_shade(_SURPRISE, one / _STRONGEST_BITS)}">'
        f"{html.escape(visible(text))}</span>"
        for text, one in _characters(pieces[:MOST_TOKENS], bits)
    ]
    left = len(pieces) - MOST_TOKENS
    more = f"<div>... and {left:,} more tokens, which are not shown</div>" if left > 0 else ""
    return (
        f"<div><div>{html.escape(note)}</div>"
        '<div style="white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1.6">'
        f"{''.join(spans)}</div>{more}</div>"
    )


def spans_html(spans: Sequence[Sequence[float]], limit: float) -> str:
    """Layers down and heads across; the shade is on a log scale."""
    heads = min(max(map(len, spans), default=0), MOST_HEADS)
    top = "".join(f'<th style="{_HEAD}">{head}</th>' for head in range(1, heads + 1))
    rows = []
    for layer, spans_H in enumerate(spans[:MOST_LAYERS], 1):
        cells = "".join(
            f'<td style="{_CELL};{_shade(_SPAN, _height(span, limit))}">{span:,.0f}</td>'
            for span in spans_H[:heads]
        )
        rows.append(f'<tr><th style="{_HEAD}">{layer}</th>{cells}</tr>')
    left = max(0, len(spans) - MOST_LAYERS), max(map(len, spans), default=0) - heads
    more = f"<div>... and {left[0]} more layers, {left[1]} more heads</div>" if any(left) else ""
    return (
        f"<div><div>Spans in tokens (limit {limit:,.0f}): layers down, heads across</div>"
        f'<table style="border-collapse:collapse"><tr><th style="{_HEAD}"></th>{top}</tr>'
        f"{''.join(rows)}</table>{more}</div>"
    )


def facts_html(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    rows = "".join(
        f'<tr><th style="{_HEAD}">{html.escape(name)}</th>'
        f'<td style="{_CELL};text-align:left">{html.escape(visible(value))}</td></tr>'
        for name, value in facts
    )
    return f'<div><b>{html.escape(title)}</b><table style="border-collapse:collapse">{rows}</table></div>'


def _characters(pieces: Iterable[bytes], bits: Iterable[float]) -> Iterable[tuple[str, float]]:
    """Whole characters with the bits of all their tokens: a token may be a part of one."""
    decoder, waiting = codecs.getincrementaldecoder("utf-8")("replace"), 0.0
    for piece, one in zip(pieces, bits, strict=False):
        waiting += one
        if text := decoder.decode(piece):
            yield text, waiting
            waiting = 0.0
    if text := decoder.decode(b"", final=True):
        yield text, waiting


def _height(span: float, limit: float) -> float:
    return math.log2(max(span, 1.0)) / math.log2(limit) if limit > 1 else 1.0


def _shade(colour: str, strength: float) -> str:
    part = strength if math.isfinite(strength) else 1.0
    return f"background:rgba({colour},{0.75 * min(1.0, max(0.0, part)):.2f})"
