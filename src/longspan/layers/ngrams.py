"""Embeddings of n-grams, the last n tokens together.

Shapes: B batch, T block, D width, E width of a table, C tables, N tokens of the longest n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from longspan.layers.input_layer import InputLayer
from longspan.state import State

PRIME = 2**31 - 1  # products of two numbers below it are exact in int64, on every device
ROOT = 48271  # its powers modulo PRIME run through every number


class NgramEmbeddings(InputLayer):
    """sum_n E_n[k_n(d_{t-n+1} ... d_t)] for every n of `sizes`, with d = token + 1, and 0 before a text.

    k_n = (sum_i d_{t-i} m_n^i mod p) mod R, i = 0 ... n - 1, with a prime p far above the R rows of a table.
    If all n-grams fit into `rows`, each has its own row: m_n = V + 1, and R is their number. Otherwise
    they are hashed, with another multiplier for every n: two pairs that share a row by chance do not share
    rows as parts of triples. Tables begin at zero. The state holds the last N - 1 digits d, N the largest of
    `sizes`. Tables may be narrower than the model: their rows are concatenated, and a matrix that begins as
    N(0, 1/columns) projects them to its width.

    The more often the training text is read, the more the tables memorise its rare n-grams, and what follows
    them. So in training a table's row is dropped per token, from the second epoch on, with a probability that
    grows to `dropout` in `dropout_epochs` equal steps.
    """

    def __init__(
        self,
        vocabulary_size: int,
        width: int,
        *,
        sizes: Sequence[int],
        rows: int,
        table_width: int | None = None,
        dropout: float = 0.0,
        dropout_epochs: int = 1,
    ) -> None:
        super().__init__()
        self.dropout, self.dropout_epochs = dropout, dropout_epochs
        # On the device, where a replayed CUDA graph reads it.
        self.row_dropout: Tensor
        self.register_buffer("row_dropout", torch.zeros(()), persistent=False)
        digits = vocabulary_size + 1
        self.sizes = tuple(sizes)
        self.multipliers = tuple(digits if digits**n <= rows else pow(ROOT, n, PRIME) for n in sizes)
        table_width = width if table_width is None else table_width
        rows_of_tables = [min(rows, digits**n) for n in sizes]
        self.tables = nn.ModuleList(nn.Embedding(size, table_width) for size in rows_of_tables)
        self.widen = None
        if table_width < width:
            self.widen = nn.Linear(len(sizes) * table_width, width, bias=False)
            nn.init.normal_(self.widen.weight, std=self.widen.in_features**-0.5)
        for table in self.tables:
            nn.init.zeros_(table.weight)  # type: ignore[arg-type]
        longest, hashes = max(sizes), zip(sizes, self.multipliers, strict=True)
        powers = [[pow(m, i, PRIME) if i < n else 0 for i in reversed(range(longest))] for n, m in hashes]
        self.powers_CN: Tensor
        self.rows_C: Tensor
        self.register_buffer("powers_CN", torch.tensor(powers), persistent=False)
        self.register_buffer("rows_C", torch.tensor(rows_of_tables), persistent=False)

    def initial_state(self, batch_size: int) -> State:
        device = next(self.parameters()).device
        return State(
            {"before": torch.zeros(batch_size, max(self.sizes) - 1, dtype=torch.long, device=device)}
        )

    def begin_epoch(self, number: int) -> None:
        """Epochs count from 0: a text that is read for the first time cannot have been memorised."""
        self.row_dropout.fill_(self.dropout * min(number / self.dropout_epochs, 1.0))

    def compile_parts(self) -> None:
        """Only the arithmetic: for tables, torch without compilation adds up gradients in a fixed order."""
        self._rows = torch.compile(self._rows)  # type: ignore[method-assign]

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        digits_BS = torch.cat([state.tensor("before"), tokens_BT + 1], dim=1)
        block = tokens_BT.shape[1]
        rows_CBT = self._rows(digits_BS)
        found = [table(rows_BT) for table, rows_BT in zip(self.tables, rows_CBT.unbind(), strict=True)]
        # On a GPU reading the number would synchronise, and a captured graph is replayed in every epoch.
        if self.training and self.dropout > 0 and (self.row_dropout.is_cuda or self.row_dropout > 0):
            found = self._dropped(found)
        out_BTD = reduce(torch.add, found) if self.widen is None else self.widen(torch.cat(found, dim=-1))
        return out_BTD, State({"before": digits_BS[:, block:].clone()})

    def _dropped(self, found: list[Tensor]) -> list[Tensor]:
        """Dropout of whole rows: what is kept is scaled by 1 / (1 - p)."""
        draws_BT = (torch.rand(table_BTE.shape[:2], device=table_BTE.device) for table_BTE in found)
        scales_BT = ((draw_BT >= self.row_dropout) / (1 - self.row_dropout) for draw_BT in draws_BT)
        return [table_BTE * s_BT[..., None] for table_BTE, s_BT in zip(found, scales_BT, strict=True)]

    def _rows(self, digits_BS: Tensor) -> Tensor:
        """The row of each table, [C, B, T], for every token that N - 1 digits come before.

        Each product is reduced before the sum: the sum of products may be too large for int64.
        """
        last_BTN = digits_BS.unfold(1, self.powers_CN.shape[1], 1)
        terms_CBTN = last_BTN * self.powers_CN[:, None, None] % PRIME
        return terms_CBTN.sum(-1) % PRIME % self.rows_C[:, None, None]
