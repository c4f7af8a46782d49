"""Embeddings of n-grams for plain tensors. Shapes: B batch, T block, D width, N the largest n."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from longspan.layers import ngrams
from longspan.state import State


class NgramEmbeddings(nn.Module):
    """The sum over n in `sizes` of a learned row for the last n tokens; add it to the token embeddings.

    `rows` is the size of each table. n-grams that do not all fit are hashed. With a `table_width` below the
    width, the rows are concatenated and projected. All tables begin at zero.

    `forward(tokens_BT, before)` returns [B, T, D] and the last N - 1 tokens, [B, N - 1], to be given with the
    next block as `before`. They are stored as token + 1. Zeros, and no `before`, mean that a text begins.

    `dropout` drops whole rows, per token and table, but only from the second epoch on: tables memorise the
    n-grams of the training text. It grows to its value in `dropout_epochs` equal steps, one an epoch. Call
    `begin_epoch(number)` at the start of every epoch, 0 for the first.
    """

    def __init__(
        self,
        vocabulary_size: int,
        width: int,
        *,
        sizes: Sequence[int] = (2, 3),
        rows: int,
        table_width: int | None = None,
        dropout: float = 0.0,
        dropout_epochs: int = 1,
    ) -> None:
        super().__init__()
        self.layer = ngrams.NgramEmbeddings(
            vocabulary_size,
            width,
            sizes=sizes,
            rows=rows,
            table_width=table_width,
            dropout=dropout,
            dropout_epochs=dropout_epochs,
        )

    def begin_epoch(self, number: int) -> None:
        """Call it at the start of every epoch, with 0 for the first; see `dropout`."""
        self.layer.begin_epoch(number)

    def forward(self, tokens_BT: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        begun = self.layer.initial_state(len(tokens_BT)) if before is None else State({"before": before})
        out_BTD, after = self.layer(tokens_BT, begun)
        return out_BTD, after.tensor("before")
