"""Span attention for one token after another on a CPU, while the weights stay fixed.

The small operations around a single token take longer than the products. So there are as few as possible:
what does not depend on the token is prepared once, and new keys and values are written after the old ones.

Shapes: as in the package; N = G x B rows, one for every head of a group and text, R rows of a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.kernels.span_attention.context import EPSILON, AttentionContext, soft_mask

SPARE_ROWS = 256
"""Tokens that are read before the keys and values in a buffer have to be moved."""

GROUP = 4096
"""A further group takes as long as reading this many keys and values of one head."""


def head_groups(windows: Sequence[int], kinds: Sequence[int] | None = None) -> list[list[int]]:
    """Which heads to compute together, over the longest window among them; of one kind if there are kinds."""
    kinds = kinds or [0] * len(windows)
    groups: list[list[int]] = []
    for head in sorted(range(len(windows)), key=lambda head: (kinds[head], windows[head])):
        last = groups[-1][-1] if groups else head
        further = len(groups[-1]) * (windows[head] - windows[last]) if groups else 0
        if not groups or further > GROUP or kinds[head] != kinds[last]:
            groups.append([])
        groups[-1].append(head)
    return groups


class OneToken:
    """The past of all heads, and `attend`, which reads the next token of every text and remembers it."""

    def __init__(self, context: AttentionContext, spare_rows: int | None = None) -> None:
        self._sizes = context.group_sizes
        spare = SPARE_ROWS if spare_rows is None else spare_rows
        self._groups = [_Group(group, spare) for _, group in context.groups()]
        self._filled_B = None if context.filled_B is None else context.filled_B.clone()

    def attend(self, q_BHK: Tensor, kv_BXK: Tensor, spans_BH: Tensor | None = None) -> Tensor:
        """[B, H, K]; a text has the keys of all heads and then their values.

        `spans_BH` are the spans of the token, if those in the context are of every query.
        """
        if spans_BH is not None:
            for group, spans_BG in zip(self._groups, spans_BH.split_with_sizes(self._sizes, 1), strict=True):
                group.set_spans(spans_BG)
        batch, num_heads, width = q_BHK.shape
        kv_2HBK = kv_BXK.reshape(batch, 2, num_heads, width).permute(1, 2, 0, 3)
        # Not `split`, which is written in Python.
        q_parts = q_BHK.transpose(0, 1).split_with_sizes(self._sizes)
        parts = zip(q_parts, kv_2HBK.split_with_sizes(self._sizes, 1), strict=True)
        found = [
            group.attend(q_GBK.reshape(-1, 1, width), kv_2GBK.flatten(1, 2).unsqueeze(2), self._filled_B)
            for group, (q_GBK, kv_2GBK) in zip(self._groups, parts, strict=True)
        ]
        if self._filled_B is not None:
            self._filled_B += 1
        found_N1K = found[0] if len(found) == 1 else torch.cat(found)
        return found_N1K.view(num_heads, batch, width).transpose(0, 1)

    def put(self, row: int, source: OneToken, source_row: int) -> None:
        for own, other in zip(self._groups, source._groups, strict=True):
            own.seen(row).copy_(other.seen(source_row))
        if self._filled_B is not None and source._filled_B is not None:
            self._filled_B[row] = source._filled_B[source_row]


class _Group:
    """Heads of one window. Rows are in order of time; spare rows after them are for new tokens."""

    def __init__(self, context: AttentionContext, spare_rows: int) -> None:
        (kv_BMXK,) = context.past
        batch, _, both, width = kv_BMXK.shape
        rows, window = both // 2 * batch, max(context.windows)

        def of_rows(x_GXY: Tensor) -> Tensor:
            """A tensor of the heads, [G, X, Y], repeated for every row."""
            return x_GXY.to(kv_BMXK.dtype).repeat_interleave(batch, dim=0)

        self._window, self._start = window, 0  # the rows from `start` on are seen next
        near_BMXK = kv_BMXK[:, max(0, kv_BMXK.shape[1] - window) :]
        missing = window - near_BMXK.shape[1]
        self._kv_2NRK = kv_BMXK.new_empty(2, rows, window + spare_rows, width)
        self._kv_2NRK[:, :, :missing] = 0  # keys and values before the first are zeros
        self._by_head_XBRK = self._kv_2NRK.view(both, batch, -1, width)
        self._by_head_XBRK[:, :, missing:window] = near_BMXK.permute(2, 0, 1, 3)
        self._keys_NKR, self._values_NRK = self._kv_2NRK[0].mT, self._kv_2NRK[1]
        self._scale, self._sees_itself = 1 / math.sqrt(width), context.first_distance == 0
        self._renormalise, self._ramp = context.renormalise and context.spans is not None, context.ramp
        self._exact = torch.promote_types(kv_BMXK.dtype, torch.float32)
        biases = (context.content_bias_HK, context.position_bias_HK)
        self._content_bias, self._position_bias = (None if b is None else of_rows(b[:, None]) for b in biases)
        self._position_keys_NKW = None
        self._mask_N1W: Tensor | None = None
        if (position_keys := context.mapped_position_keys()) is not None:
            keys_KW = position_keys[..., :window, :].flip(-2).to(kv_BMXK.dtype).mT
            self._position_keys_NKW = keys_KW.expand(rows, -1, -1) if keys_KW.dim() == 2 else of_rows(keys_KW)
        if context.spans is not None:
            spans = context.spans
            self.set_spans(spans.expand(batch, -1) if spans.dim() == 1 else spans[..., 0])
        self._persistent = None
        if context.persistent is not None:
            self._persistent = of_rows(context.persistent[0]).mT, of_rows(context.persistent[1])
        self._distance_W = torch.arange(window - 1, -1, -1, device=kv_BMXK.device)

    def seen(self, text: int) -> Tensor:
        return self._by_head_XBRK[:, text, self._start : self._start + self._window]

    def set_spans(self, spans_BG: Tensor) -> None:
        mask_BGW = soft_mask(spans_BG, self._ramp, self._window).flip(-1).to(self._exact)
        self._mask_N1W = mask_BGW.transpose(0, 1).reshape(-1, 1, self._window)

    def attend(self, q_N1K: Tensor, kv_2N1K: Tensor, filled_B: Tensor | None) -> Tensor:
        """[N, 1, K]."""
        if self._sees_itself:
            self._remember(kv_2N1K)
        weights_N1X = self._weights(q_N1K, filled_B)
        values_NWK = self._values_NRK.narrow(1, self._start, self._window)
        used_N1X = weights_N1X if weights_N1X.dtype == q_N1K.dtype else weights_N1X.to(q_N1K.dtype)
        if self._persistent is None:
            out_N1K = torch.bmm(used_N1X, values_NWK)
        else:
            out_N1K = torch.bmm(used_N1X[..., : self._window], values_NWK)
            out_N1K.baddbmm_(used_N1X[..., self._window :], self._persistent[1])
        if self._renormalise:
            out_N1K.div_(weights_N1X.sum(-1, keepdim=True).add_(EPSILON))
        if not self._sees_itself:
            self._remember(kv_2N1K)
        return out_N1K

    def _weights(self, q_N1K: Tensor, filled_B: Tensor | None) -> Tensor:
        """Of the distances, oldest first, and then of the persistent vectors: not yet renormalised."""
        content_N1K = q_N1K if self._content_bias is None else q_N1K + self._content_bias
        position_N1K = q_N1K if self._position_bias is None else q_N1K + self._position_bias
        keys_NKW = self._keys_NKR.narrow(2, self._start, self._window)
        if self._position_keys_NKW is None:
            scores_N1X = torch.bmm(content_N1K, keys_NKW).mul_(self._scale)
        else:
            scores_N1X = torch.bmm(position_N1K, self._position_keys_NKW)
            scores_N1X.baddbmm_(content_N1K, keys_NKW, beta=self._scale, alpha=self._scale)
        if filled_B is not None:
            unseen_B1W = (self._distance_W > filled_B[:, None])[:, None]
            scores_N1X.unflatten(0, (-1, len(filled_B))).masked_fill_(unseen_B1W, -math.inf)
        if self._persistent is not None:
            persistent_N1P = torch.bmm(content_N1K, self._persistent[0]).mul_(self._scale)
            scores_N1X = torch.cat([scores_N1X, persistent_N1P], dim=-1)
        weights_N1X = torch.softmax(scores_N1X, dim=-1, dtype=self._exact)
        if self._mask_N1W is not None:
            masked = weights_N1X if self._persistent is None else weights_N1X.narrow(-1, 0, self._window)
            masked.mul_(self._mask_N1W)
        return weights_N1X

    def _remember(self, kv_2N1K: Tensor) -> None:
        end = self._start + self._window
        if end == self._kv_2NRK.shape[2]:
            self._kv_2NRK[:, :, : self._window] = self._kv_2NRK[:, :, self._start :].clone()
            self._start, end = 0, self._window
        self._kv_2NRK.narrow(2, end, 1).copy_(kv_2N1K)
        self._start += 1
