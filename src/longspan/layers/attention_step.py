"""Single tokens through an attention block, while the weights are fixed.

Shapes: as in `attention.py`; E = R K, all rows of a token end to end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.kernels.linear import PARTS, FixedProduct
from longspan.kernels.span_attention import decoding_groups, one_token
from longspan.layers.block import RowStep
from longspan.layers.head_groups import HeadGroups
from longspan.layers.select_heads import select_heads
from longspan.state import State

if TYPE_CHECKING:
    from longspan.layers.attention import Attention


class AttentionStep(RowStep):
    """Its texts have a past of their own, keys and values, which starts from a state."""

    def __init__(self, block: Attention, state: State, weights: _Weights | None = None) -> None:
        weight = block.query.weight
        self._block, self._weights = block, weights or _Weights(block)
        heads = self._weights.heads
        past = [kv_BMXK.to(weight.dtype) for kv_BMXK in block._recall(state, heads)]
        # Spans that depend on the input are given with every token.
        x_B1D = weight.new_zeros(past[0].shape[0], 1, block.query.in_features)
        context = block._context(heads, past, state, x_B1D)
        self._attention = one_token(context)
        self._dynamic = context.spans is not None and context.spans.dim() > 1
        names = ["read"] * block._positions[0].counts + ["offset"] * (block.still > 0)
        self._kept = State({name: _own(state.tensor(name), weight) for name in names})
        self._unchanged = not (block.qk_norm or self._kept or block.value_gates)
        self._sizes = [block.num_heads, 2 * block.num_heads]

    def __call__(self, h_1BD: Tensor, *more: Tensor) -> Tensor:
        block, order = self._block, self._weights.heads.order
        x_1BD = block.norm(h_1BD) if block.norm_first else h_1BD
        x_B1D = x_1BD.transpose(0, 1)
        rows_1BE, gate_1BH, _ = self._weights.project(x_1BD).split(self._weights.sizes, -1)
        rows_B1RK = rows_1BE.reshape(h_1BD.shape[1], 1, -1, block.head_width)
        value_B1D = more[0].transpose(0, 1) if more else None
        gate_B1H = gate_1BH.transpose(0, 1).sigmoid() if block.value_gates is not None else None
        mix, mixed = block._mix(rows_B1RK, value_B1D, gate_B1H, self._kept, order)
        if self._unchanged:
            q_BHK, kv_BXK = rows_B1RK.squeeze(1).split_with_sizes(self._sizes, 1)
        else:
            qkv = block._qk_norm_rope(rows_B1RK, self._kept, order, mix)
            q_BHK, kv_BXK = qkv.q_BTHK.squeeze(1), qkv.kv_BTXK.squeeze(1)
        spans = block.span.spans_for(x_B1D) if self._dynamic else None
        spans_BH = None if spans is None else select_heads(spans[..., 0], order, dim=1)
        found_BHK = self._attention.attend(q_BHK, kv_BXK, spans_BH)
        for name, leaf in self._kept.flatten().items():
            if name in mixed:
                leaf.copy_(mixed[name])
            else:
                leaf += 1  # tokens read
        h_1BD = self._weights.project_out(found_BHK.reshape(1, h_1BD.shape[1], -1), onto=h_1BD)
        return h_1BD if block.norm_first else block.norm(h_1BD)

    def begin(self, state: State) -> AttentionStep:
        return AttentionStep(self._block, state, self._weights)

    def put(self, row: int, source: Any, source_row: int = 0) -> None:
        assert isinstance(source, AttentionStep)
        self._attention.put(row, source._attention, source_row)  # type: ignore[arg-type]
        others = source._kept.flatten()
        for name, leaf in self._kept.flatten().items():
            leaf[row] = others[name][source_row]


def _own(kept: Tensor, weight: Tensor) -> Tensor:
    """A copy, in the precision of the weights: the text may have been read in another one."""
    return kept.to(weight.dtype if kept.is_floating_point() else kept.dtype, copy=True)


class _Weights:
    """Projections, with their heads in the order of groups.

    The gates of value embeddings are further rows of the matrix: they need no product of their own. Rows of
    zeros make their number a multiple of `PARTS`.
    """

    def __init__(self, block: Attention) -> None:
        windows_H, weight = block._windows(1), block.query.weight
        kinds_H = block._group_kinds()
        self.heads = HeadGroups(
            windows_H, decoding_groups(weight, block.head_width, windows_H, kinds_H=kinds_H)
        )
        order = self.heads.order
        matrices = (layer.weight for layer in (block.query, block.key, block.value))
        parts = [torch.cat([block._rows(matrix, order) for matrix in matrices])]
        rows_HC = weight[:0] if block.value_gates is None else block.value_gates.of(order)
        parts.append(F.pad(rows_HC, (0, weight.shape[1] - rows_HC.shape[1])))
        parts.append(weight.new_zeros(-sum(map(len, parts)) % PARTS, weight.shape[1]))
        self.sizes = [len(part) for part in parts]
        self.project = FixedProduct(torch.cat(parts))
        self.project_out = FixedProduct(
            block._rows(block.out.weight.mT, order).mT.contiguous(), block.out.bias
        )
