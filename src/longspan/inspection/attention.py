"""Attention weights by distance, computed again from the recorded inputs of the layers.

The formula is that of `kernels.span_attention.reference`, for all queries at once.
Shapes: B = 1 text, T tokens, S keys, H heads, G heads of a group, K head width, W distances, P persistent
vectors, D width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan import reading
from longspan.errors import UserError
from longspan.kernels.span_attention.context import EPSILON, soft_mask
from longspan.layers.recording import recording
from longspan.layers.sha_attention import SingleHeadAttention
from longspan.reading import Ids, TextState, blocks

if TYPE_CHECKING:
    from longspan.models.interface import LanguageModel

Weights: TypeAlias = (
    "tuple[Tensor, Tensor | None]"  # of keys, [H, T, W], and of persistent vectors, [H, T, P]
)

QUERIES = 128  # computed at once: it bounds the memory needed for long spans


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer to a text.

    `weights_HTW[h, t, d]` is the weight that head h at token t gives to the token d places before it; d = 0
    is the token itself. `persistent_HTP` are the weights of persistent vectors, if the layer has any. Both
    together add up to 1 for every token, unless the layer's soft mask is not renormalised. Where a text
    begins with a memory of zeros, these zeros have weights too.
    """

    name: str  # of the module
    weights_HTW: Tensor
    persistent_HTP: Tensor | None

    @property
    def mean_distance_H(self) -> Tensor:
        """How far back a head looks on average, in tokens."""
        return mean_distance(self.weights_HTW.double().sum(1))

    def reach_H(self, part: float = 0.9) -> Tensor:
        """The distance within which a head has this part of its weight, over all tokens of the text."""
        return reach(self.weights_HTW.double().sum(1), part)


def mean_distance(weights_W: Tensor) -> Tensor:
    """The weighted mean of the distances; not a number (nan) without weights. More axes may come first."""
    distances_W = torch.arange(weights_W.shape[-1], dtype=weights_W.dtype, device=weights_W.device)
    return (weights_W @ distances_W) / weights_W.sum(-1)


def reach(weights_W: Tensor, part: float) -> Tensor:
    """The smallest distance within which this part of the weight lies. More axes may come first."""
    inside_W = weights_W.cumsum(-1) >= part * (1 - 1e-9) * weights_W.sum(-1, keepdim=True)
    return inside_W.int().argmax(-1)


def attention(model: LanguageModel, ids: Ids, before: TextState | None = None) -> list[LayerAttention]:
    """The attention of every layer to every token, in the order in which the layers come."""
    found: dict[str, list[Weights]] = {}
    with closing(recorded(model, ids, before)) as read:
        for _, calls in read:
            for name, layer, inputs in calls:
                found.setdefault(name, []).extend(weights_in_chunks(layer, inputs))
    return [_joined(name, parts) for name, parts in found.items()]


def token_attention(
    model: LanguageModel, ids: Ids, token: int, before: TextState | None = None
) -> list[LayerAttention]:
    """The attention of every layer at one token of a text (T = 1); only its block is recorded."""
    if not 0 <= token < len(ids):
        raise UserError(f"there is no token {token}: the text has tokens 0 to {len(ids) - 1}")
    start = token - token % reading.READ_BLOCK
    for _, after in blocks(model, ids[:start], before):
        before = after
    ((_, calls),) = recorded(model, ids[start : start + reading.READ_BLOCK], before)
    found: dict[str, LayerAttention] = {}
    for name, layer, inputs in calls:
        row = token - start
        found[name] = _joined(name, [weights_of(layer, inputs, row, row + 1)])
    return list(found.values())


def recorded(
    model: LanguageModel, ids: Ids, before: TextState | None = None
) -> Generator[tuple[int, list[tuple[str, nn.Module, Any]]], None, None]:
    """For every block of a text its length and the calls of attention: name of the layer, layer, inputs.

    Use it with `closing`: it records until it is exhausted or closed.
    """
    names = {module: name for name, module in model.named_modules()}
    with recording() as kept:
        for hidden_TD, _ in blocks(model, ids, before):
            calls = [(name, layer, inputs) for layer, name in names.items() for inputs in kept.get(layer, ())]
            yield len(hidden_TD), calls
            kept.clear()


def weights_in_chunks(layer: nn.Module, inputs: Any) -> Iterator[Weights]:
    """The weights of one call, for `QUERIES` tokens at a time."""
    queries = inputs[0].shape[-2]
    for start in range(0, queries, QUERIES):
        yield weights_of(layer, inputs, start, min(start + QUERIES, queries))


@torch.no_grad()
def weights_of(layer: nn.Module, inputs: Any, start: int, end: int) -> Weights:
    """The weights of the queries from `start` to `end` of one call."""
    if isinstance(layer, SingleHeadAttention):
        q_BTD, keys, visible_BTS = inputs
        seen = visible_BTS.shape[2] - q_BTD.shape[1] + end
        k_BSD = torch.cat(list(keys), dim=1)[:, :seen]
        return _single_head(q_BTD[:, start:end], k_BSD, visible_BTS[:, start:end, :seen])
    q_BHTK, k_BHTK, order, given = inputs
    if given.filled_B is not None:
        given = dataclasses.replace(given, filled_B=given.filled_B + start)
    if given.spans is not None and given.spans.dim() == 3:  # spans of every query
        given = dataclasses.replace(given, spans=given.spans[..., start:end])
    return _heads(q_BHTK[:, :, start:end], k_BHTK[:, :, :end], order, given)


def _joined(name: str, parts: Sequence[Weights]) -> LayerAttention:
    """Weights of chunks one after the other, padded to the furthest distance."""
    furthest = max(weights_HTW.shape[2] for weights_HTW, _ in parts)
    weights = [F.pad(weights_HTW, (0, furthest - weights_HTW.shape[2])) for weights_HTW, _ in parts]
    persistent = [persistent_HTP for _, persistent_HTP in parts if persistent_HTP is not None]
    return LayerAttention(name, torch.cat(weights, 1), torch.cat(persistent, 1) if persistent else None)


def _heads(q_BHTK: Tensor, k_BHTK: Tensor, order: Sequence[int], given: Any) -> Weights:
    """The weights of heads that were computed in this order, in groups."""
    sizes = [kv_BMXK.shape[2] // 2 for kv_BMXK in given.past]
    found = [
        _group(q_BHTK, k_BHTK, kv_BMXK, slice(end - size, end), given)
        for kv_BMXK, size, end in zip(given.past, sizes, accumulate(sizes), strict=True)
    ]
    furthest = max(weights_GTW.shape[2] for weights_GTW, _ in found)
    weights = torch.cat([F.pad(w_GTW, (0, furthest - w_GTW.shape[2])) for w_GTW, _ in found])
    persistent = [persistent_GTP for _, persistent_GTP in found if persistent_GTP is not None]
    places = sorted(range(len(order)), key=order.__getitem__)
    return weights[places], torch.cat(persistent)[places] if persistent else None


def _group(q_BHTK: Tensor, k_BHTK: Tensor, kv_BMXK: Tensor, heads: slice, given: Any) -> Weights:
    """The weights of heads that share a window; `given` is what the layer gave to `span_attention`."""
    q_GTK = q_BHTK[0, heads].double()
    past_GMK = kv_BMXK[0].transpose(0, 1)[: q_GTK.shape[0]]
    k_GSK = torch.cat([past_GMK, k_BHTK[0, heads]], dim=1).double()
    window, first, scale = max(given.windows[heads]), given.first_distance, 1 / math.sqrt(q_GTK.shape[2])
    asked_GTK = (
        q_GTK if given.content_bias_HK is None else q_GTK + given.content_bias_HK[heads, None].double()
    )
    scores_GTW = _by_distance(asked_GTK @ k_GSK.mT, first, window) * scale
    if given.position_keys is not None:
        placed = (
            q_GTK if given.position_bias_HK is None else q_GTK + given.position_bias_HK[heads, None].double()
        )
        if given.position_map_HKE is not None:
            placed = placed @ given.position_map_HKE[heads].double()
        keys = given.position_keys if given.position_keys.dim() == 2 else given.position_keys[heads]
        scores_GTW = scores_GTW + placed @ keys[..., :window, :].double().mT * scale
    distances_W = torch.arange(first, first + window, device=q_GTK.device)
    if given.filled_B is not None:
        reach_T1 = torch.arange(q_GTK.shape[1], device=q_GTK.device)[:, None] + given.filled_B[0]
        scores_GTW = scores_GTW.masked_fill(distances_W > reach_T1, -math.inf)
    mask_GTW = None
    if given.spans is not None:
        spans_GT = given.spans[heads, None] if given.spans.dim() == 1 else given.spans[0, heads]
        mask_GTW = soft_mask(spans_GT.double(), given.ramp, window)
    persistent_GTP = asked_GTK.new_empty(*asked_GTK.shape[:2], 0)
    if given.persistent is not None:
        persistent_GTP = asked_GTK @ given.persistent[0][heads].double().mT * scale
    weights = torch.cat([scores_GTW, persistent_GTP], dim=2).softmax(2)
    if mask_GTW is not None:
        weights = weights * F.pad(mask_GTW, (0, persistent_GTP.shape[2]), value=1.0)
        if given.renormalise:
            weights = weights / (weights.sum(2, keepdim=True) + EPSILON)
    weights = weights.to(q_BHTK.dtype)
    weights_GTW, persistent_GTP = weights[..., :window], weights[..., window:]
    # So that a column is a distance: a head that does not see its own token has no weight there.
    return F.pad(weights_GTW, (first, 0)), None if given.persistent is None else persistent_GTP


def _single_head(q_BTD: Tensor, k_BSD: Tensor, visible_BTS: Tensor) -> Weights:
    """The weights of SHA-RNN's attention, whose queries are scaled already."""
    k_SD = k_BSD[0].double()
    scores_TS = q_BTD[0].double() @ k_SD.mT / math.sqrt(k_SD.shape[1])
    weights_TS = scores_TS.masked_fill(~visible_BTS[0], -math.inf).softmax(1)
    return _by_distance(weights_TS[None].to(q_BTD.dtype), 0, k_SD.shape[0]), None


def _by_distance(x_GTS: Tensor, first: int, window: int) -> Tensor:
    """From one column for each key to one for each distance; before the first key there are zeros."""
    block, num_keys = x_GTS.shape[1:]
    t_T1 = torch.arange(block, device=x_GTS.device)[:, None]
    distances_W = torch.arange(first, first + window, device=x_GTS.device)
    keys_TW = num_keys - block + t_T1 - distances_W
    found_GTW = x_GTS.gather(2, keys_TW.clamp(min=0).expand(x_GTS.shape[0], -1, -1))
    return found_GTW.masked_fill(keys_TW < 0, 0.0)
