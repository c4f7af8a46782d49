"""How far back every head looks at every token of a text. Shapes: L layers, H heads, T tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.files import whole_file
from longspan.layers.recording import recording
from longspan.layers.select_heads import inverse
from longspan.reading import Ids, TextState, blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from longspan.models.interface import LanguageModel

PER_ROW, MOST_ROWS = 120, 6
"""Tokens in a row of the figure, and the rows up to which it shows their text."""

LINES = 200
"""Tokens that are printed."""


def token_spans(
    model: LanguageModel,
    ids: Ids,
    before: TextState | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """In tokens, the ramp included, [L, H, T]. Spans that do not depend on the input are repeated.

    `progress(done, total)` is called after every block with the number of tokens.
    """
    found: dict[torch.nn.Module, list[Tensor]] = {}
    done = 0
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
            done += len(hidden_TD)
            if progress is not None:
                progress(done, len(ids))
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
    """Write the picture as PNG: tokens across, heads of all layers down, the colour is the span.

    The text is broken into rows of `PER_ROW` tokens, with their text below. Beyond `MOST_ROWS` rows it is one
    long row without text.
    """
    from matplotlib.figure import Figure

    num_layers, num_heads, count = spans_LHT.shape
    labelled = count <= MOST_ROWS * PER_ROW
    width = min(count, PER_ROW) if labelled else count
    num_rows = math.ceil(count / width)
    padded_XT = np.full((num_layers * num_heads, num_rows * width), np.nan)
    padded_XT[:, :count] = spans_LHT.flatten(0, 1).cpu().numpy()
    height = min(30.0 / num_rows, max(2.0, 0.1 * num_layers * num_heads) + 0.5)
    size = (min(18.0, max(8.0, 0.14 * width + 1.5)), num_rows * height + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{name}: how far each head looks back at each token", fontsize=13)
    middles = num_heads * (np.arange(num_layers) + 0.5) - 0.5
    names = [str(layer + 1) for layer in range(num_layers)]
    panels = figure.subplots(num_rows, squeeze=False)[:, 0]
    for row, axes in enumerate(panels):
        first = row * width
        picture = axes.imshow(
            padded_XT[:, first : first + width],
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            vmin=0,
            vmax=max(float(spans_LHT.max()), 1.0),
        )
        axes.set_ylabel("layer")
        axes.set_yticks(middles, names)
        for layer in range(1, num_layers):
            axes.axhline(layer * num_heads - 0.5, color="white", linewidth=0.8)
        if labelled:
            labels = [_label(piece) for piece in pieces[first : first + width]]
            axes.set_xticks(range(len(labels)), labels, fontsize=8, parse_math=False)
    panels[-1].set_xlabel("tokens; the rows of a layer are its heads")
    figure.colorbar(picture, ax=panels, label="span in tokens", fraction=0.02, pad=0.01)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=110)


def _label(piece: bytes) -> str:
    """The text of a token, with a dot for what the font may not have."""
    text = piece.decode("utf-8", "replace").replace(" ", "_").replace("\n", "\\n")
    return "".join(letter if 0x20 < ord(letter) < 0x250 and letter.isprintable() else "·" for letter in text)
