"""The page of `longspan inspect`: a text shaded by the bits of its tokens, and what each head looked at."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from longspan.inspection.report.page import table, whole_page

LEGEND = '<p class="legend soft" aria-hidden="true">0 bits <span></span> 12 bits or more</p>'


def text_page(facts: dict[str, Any], tokens: Sequence[dict[str, Any]]) -> str:
    """The HTML of the tokens that are shown, and the totals of the whole text."""
    shown, every = len(tokens), facts["tokens"]
    limit = f"<p>Only the first {shown:,} of {every:,} tokens are shown.</p>" if shown < every else ""
    with_heads = sum("mean_distance" in token for token in tokens)
    if with_heads < shown and facts["layers"]:
        limit += f"<p>Attention is shown for the first {with_heads:,} of them.</p>"
    per_byte = facts["bits_per_byte"]
    totals = [
        ("bytes", f"{facts['bytes']:,}"),
        ("tokens", f"{every:,}"),
        ("bits per byte", "–" if per_byte is None else f"{per_byte:.4f}"),
        ("bits per token", f"{facts['bits_per_token']:.4f}"),
    ]
    heads = [
        (
            str(number),
            str(head),
            "–" if one["mean_distance"] is None else f"{one['mean_distance']:,.1f}",
            f"{one['reach_90']:,}",
        )
        for number, layer in enumerate(facts["layers"], 1)
        for head, one in enumerate(layer["heads"], 1)
    ]
    attention = ""
    if heads:
        attention = (
            '<section id="attention"><h2>Attention</h2>\n'
            f"<p>Over the first {facts['attention_tokens']:,} tokens, distances in tokens.</p>\n"
            + table(("layer", "head", "mean distance", "90% within"), heads, name="Attention")
            + "</section>"
        )
    parts = ""
    if facts["surprising"]:
        rows = [
            (f"{part['token']:,}", f"{part['bits_per_token']:.3f}", part["text"])
            for part in facts["surprising"]
        ]
        parts = (
            '<section id="surprising"><h2>Most surprising parts</h2>\n'
            f"<p>Of all of the text, {facts['surprising'][0]['tokens']} tokens each.</p>\n"
            + table(("from token", "bits per token", "text"), rows, name="Most surprising parts")
            + "</section>"
        )
    title = f"{facts['text']} read by {facts['run']}"
    body = "\n".join(
        [
            f"<header><h1>{html.escape(title)}</h1></header>",
            "<main>",
            '<section id="totals"><h2>Totals</h2>',
            table(("", "all of the text"), totals, name="Totals"),
            "</section>",
            '<section id="text"><h2>Text</h2>',
            '<p class="soft">A stronger colour means more bits: the model expected the token less. '
            "Point at a token, tap it, or use the arrow keys: what its heads looked at is underlined.</p>",
            LEGEND,
            limit,
            '<div id="tokens" class="text" aria-label="Tokens"></div>',
            "</section>",
            '<section id="token"><h2 id="token-title">Token</h2>',
            '<div class="scroll" tabindex="0" role="region" aria-label="Heads at this token">'
            '<table id="token-heads"></table></div>',
            "</section>",
            attention,
            parts,
            "</main>",
        ]
    )
    return whole_page(title, body, {"tokens": list(tokens)}, ["tokens.js", "text.js"])
