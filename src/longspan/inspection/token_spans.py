"""How far back every head looks at every token of a text. Shapes: L layers, H heads, T tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from longspan.errors import UserError
from longspan.files import whole_file
from longspan.layers.recording import recording
from longspan.layers.select_heads import inverse
from longspan.reading import Ids, TextState, blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from longspan.models.interface import LanguageModel

LABELLED = 120
"""Up to this many tokens the figure shows their text."""

LINES = 200
"""Tokens that are printed."""


def token_spans(model: LanguageModel, ids: Ids, before: TextState | None = None) -> Tensor:
    """In tokens, the ramp included, [L, H, T]. Spans that do not depend on the input are repeated."""
    found: dict[torch.nn.Module, list[Tensor]] = {}
    with torch.no_grad(), recording() as kept:
        for hidden_TD, _ in blocks(model, ids, before):
            for layer, calls in kept.items():
                for _, _, order, context in (call for call in calls if len(call) == 4):
                    if context.spans is not None:
                        spans = context.spans[:, None] if context.spans.dim() == 1 else context.spans[0]
                        sizes_HT = layer.span.sizes_of(spans.double())  # type: ignore[union-attr, operator]
                        own_HT = sizes_HT.expand(-1, len(hidden_TD))[inverse(list(order))]
                        found.setdefault(layer, []).append(own_HT)
            kept.clear()
    layers = [torch.cat(found[module], dim=1) for module in model.modules() if module in found]
    if not layers:
        raise UserError("there are no spans to show: the text is empty, or the model learns no spans")
    if len({len(spans_HT) for spans_HT in layers}) > 1:
        raise UserError("the layers of this model have different numbers of heads")
    return torch.stack(layers)


def token_spans_as_text(pieces: Sequence[bytes], spans_LHT: Tensor) -> str:
    """A line for every token: its text, the mean span of all heads and the longest."""
    lines = ["token            mean  longest  layer  head"]
    for piece, spans_LH in zip(pieces[:LINES], spans_LHT.unbind(2), strict=False):
        layer, head = divmod(int(spans_LH.argmax()), spans_LH.shape[1])
        mean, longest = float(spans_LH.mean()), float(spans_LH.max())
        text = repr(piece.decode("utf-8", "replace"))
        lines.append(f"{text:<12} {mean:>8.1f}  {longest:>7.0f}  {layer + 1:>5}  {head + 1:>4}")
    if len(pieces) > LINES:
        lines.append(f"... and {len(pieces) - LINES:,} more tokens: --json prints all, for every head")
    return "\n".join(lines)


def draw_token_spans(name: str, pieces: Sequence[bytes], spans_LHT: Tensor, path: Path) -> None:
    """Write the picture as PNG: tokens across, heads of all layers down, the colour is the span."""
    num_layers, num_heads, count = spans_LHT.shape
    size = (min(30.0, max(8.0, 0.14 * count)), min(30.0, max(3.0, 0.16 * num_layers * num_heads + 1.5)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(
        spans_LHT.flatten(0, 1).cpu().numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0
    )
    figure.colorbar(picture, label="span in tokens")
    axes.set_title(f"{name}: how far each head looks back at each token", loc="left", fontsize=11)
    axes.set_ylabel("layer (rows are its heads)")
    axes.set_yticks(num_heads * (np.arange(num_layers) + 0.5) - 0.5, [*map(str, range(1, num_layers + 1))])
    for layer in range(1, num_layers):
        axes.axhline(layer * num_heads - 0.5, color="white", linewidth=0.8)
    axes.set_xlabel("token")
    if count <= LABELLED:
        axes.set_xticks(range(count), [_label(piece) for piece in pieces], fontsize=7, parse_math=False)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def _label(piece: bytes) -> str:
    """The text of a token, with a dot for what the font may not have."""
    text = piece.decode("utf-8", "replace").replace(" ", "_").replace("\n", "\\n")
    return "".join(letter if 0x20 < ord(letter) < 0x250 and letter.isprintable() else "·" for letter in text)
