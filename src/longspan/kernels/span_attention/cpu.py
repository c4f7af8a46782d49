"""Span attention on a CPU in compiled C++: every head computes its own window and no more.

`cpu.cpp` has no persistent vectors, biases, position keys of single heads or spans without renormalisation,
computes in float32 only, and needs heads whose width is a multiple of 16. All this is left to `eager.py`, and
so are blocks too short to gain from it.

Shapes: as in the package.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longspan.kernels.compiler import can_compile, compiled
from longspan.kernels.layout import contiguous_rows
from longspan.kernels.span_attention.context import AttentionContext, soft_mask

__all__ = ["can_compile", "is_compiled", "span_attention", "supports"]

SOURCE = Path(__file__).with_name("cpu.cpp")
LANES = 16
"""Numbers in the widest vector register."""

SHORTEST = 16
"""Blocks of fewer queries are left to plain torch."""


class _Rows(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_void_p),
        ("of_batch", ctypes.c_int64),
        ("of_head", ctypes.c_int64),
        ("of_row", ctypes.c_int64),
    )


class _Head(ctypes.Structure):
    _fields_ = (
        *((name, _Rows) for name in ("keys", "values", "dkeys", "dvalues")),
        *((name, ctypes.c_int64) for name in ("number", "remembered", "window", "begins")),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "block", "width")),
        *((name, ctypes.c_int64) for name in ("first_distance", "longest", "threads", "seed")),
        *((name, ctypes.c_float) for name in ("scale", "dropout", "ramp")),
        *((name, _Rows) for name in ("q", "k", "v", "out", "dq", "dk", "dv", "dout")),
        ("each", ctypes.POINTER(_Head)),
        *((name, ctypes.c_void_p) for name in ("filled", "mask", "spans", "position_keys")),
        *((name, ctypes.c_void_p) for name in ("dmask", "dspans", "dposition_keys")),
        *((name, ctypes.c_void_p) for name in ("weights", "totals", "task_dmask", "task_dkeys")),
    )


class _Settings(NamedTuple):
    """What gets no gradient."""

    windows: Sequence[int]
    filled_B: Tensor | None
    first_distance: int
    ramp: int
    dropout: float
    seed: int
    learns: bool

    @property
    def columns(self) -> int:
        """Distances of all windows together, each rounded up to whole vectors."""
        return sum(map(_columns, self.windows))


def supports(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, context: AttentionContext) -> bool:
    """Whether the compiled code supports these inputs. The first call compiles it."""
    block, width = q_BHTK.shape[2:]
    if block < SHORTEST or width % LANES or torch.compiler.is_compiling():
        return False
    biases = context.content_bias_HK, context.position_bias_HK
    missing = *biases, context.position_map_HKE, context.persistent
    if any(x is not None for x in missing) or not (context.renormalise or context.spans is None):
        return False
    if context.position_keys is not None and context.position_keys.dim() != 2:
        return False
    return all(map(_is_plain, (q_BHTK, k_BHTK, v_BHTK, *context.past))) and is_compiled()


def is_compiled() -> bool:
    """Whether there is compiled code. The first call compiles it."""
    return compiled(SOURCE) is not None


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" and x.dtype == torch.float32


def span_attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, context: AttentionContext) -> Tensor:
    """The operation of the package docstring, all heads in one call."""
    _check(q_BHTK, k_BHTK, v_BHTK, context)
    spans, windows = None if context.spans is None else context.spans.to(q_BHTK.dtype), context.windows
    spans_H, spans_BHT = (None, spans) if spans is not None and spans.dim() == 3 else (spans, None)
    if spans is None:  # no soft mask hides distant keys: heads of a group share a window
        windows = [max(group.windows) for _, group in context.groups() for _ in group.windows]
    if spans_BHT is not None and context.windows_follow_spans:
        reaches_H = spans_BHT.detach().amax((0, 2)).ceil() + (context.ramp + 1)
        windows = [int(min(window, reach)) for window, reach in zip(windows, reaches_H.tolist(), strict=True)]
    longest, spans_BHT = max(windows), None if spans_BHT is None else spans_BHT.contiguous()
    mask_HL = None if spans_H is None else soft_mask(spans_H, context.ramp, longest)
    keys, filled_B = context.position_keys, context.filled_B
    p_LK = None if keys is None else keys[:longest].to(q_BHTK.dtype).contiguous()
    inputs = (q_BHTK, k_BHTK, v_BHTK, mask_HL, spans_BHT, p_LK, *context.past)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    seed = int(torch.randint(2**31, (1,))) if context.dropout > 0 else 0
    filled_B = None if filled_B is None else filled_B.to(torch.int64).contiguous()
    options = context.first_distance, context.ramp, context.dropout
    settings = _Settings(windows, filled_B, *options, seed, learns)
    with torch.autocast("cpu", enabled=False):
        out_BTHK: Tensor = _SpanAttention.apply(settings, *inputs)  # type: ignore[no-untyped-call]
    return out_BTHK.transpose(1, 2)


def _check(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, context: AttentionContext) -> None:
    """Shapes: compiled code reads memory without checking."""
    batch, heads, _, width = q_BHTK.shape
    windows, keys = context.windows, context.position_keys
    wrong = {
        "keys": k_BHTK.shape != q_BHTK.shape,
        "values": v_BHTK.shape != q_BHTK.shape,
        "windows": len(windows) != heads or min(windows) < 1,
        "past": sum(context.group_sizes) != heads
        or any((kv_BMXK.shape[0], kv_BMXK.shape[3]) != (batch, width) for kv_BMXK in context.past),
        "position_keys": keys is not None and (len(keys) < max(windows) or keys.shape[1] != width),
        "filled_B": context.filled_B is not None and context.filled_B.shape != (batch,),
        "spans": context.spans is not None and context.spans.shape not in ((heads,), q_BHTK.shape[:3]),
    }
    if any(wrong.values()):
        raise ValueError(f"{', '.join(name for name in wrong if wrong[name])} do not fit to the queries")


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: _Settings, *given: Tensor | None) -> Tensor:
        inputs: list[Any] = [None if x is None else contiguous_rows(x) for x in given]
        q_BHTK = inputs[0]
        batch, heads, block, width = q_BHTK.shape
        out_BTHK: Tensor = q_BHTK.new_empty(batch, block, heads, width)
        totals = q_BHTK.new_empty(batch, heads, block)
        weights = q_BHTK.new_empty(batch * block * settings.columns) if settings.learns else None
        call = _call(settings, *inputs)
        call.out, call.totals, call.weights = _rows(out_BTHK, head=2, row=1), _start(totals), _start(weights)
        _library().forward(ctypes.byref(call))
        ctx.settings = settings
        ctx.save_for_backward(*inputs, totals, weights)
        return out_BTHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BTHK: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, totals, weights = ctx.saved_tensors
        q_BHTK, _, _, mask_HL, spans_BHT, p_LK, *past = inputs
        batch, heads, block, width = q_BHTK.shape
        dout_BTHK = contiguous_rows(dout_BTHK)
        # In one tensor, as the projection produced q, k and v.
        dq, dk, dv = q_BHTK.new_empty(batch, block, 3 * heads, width).split(heads, dim=2)
        shared = mask_HL, spans_BHT, p_LK
        dmask_HL, dspans_BHT, dp_LK = (None if x is None else torch.empty_like(x) for x in shared)
        dpast = [contiguous_rows(torch.empty_like(kv_BMXK)) for kv_BMXK in past]
        task_dmask = q_BHTK.new_empty(batch * ctx.settings.columns)
        task_dkeys = None if p_LK is None else q_BHTK.new_empty(batch * ctx.settings.columns, width)
        call = _call(ctx.settings, *inputs, dpast=dpast)
        call.dout, call.dq, call.dk, call.dv = (_rows(x, head=2, row=1) for x in (dout_BTHK, dq, dk, dv))
        call.totals, call.weights = _start(totals), _start(weights)
        call.dmask, call.dspans, call.dposition_keys = map(_start, (dmask_HL, dspans_BHT, dp_LK))
        call.task_dmask, call.task_dkeys = _start(task_dmask), _start(task_dkeys)
        _library().backward(ctypes.byref(call))
        return None, *(x.transpose(1, 2) for x in (dq, dk, dv)), dmask_HL, dspans_BHT, dp_LK, *dpast


def _call(
    settings: _Settings, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask_HL: Tensor | None,
    spans_BHT: Tensor | None, p_LK: Tensor | None, *past: Tensor, dpast: Sequence[Tensor] | None = None,
) -> _Call:  # fmt: skip
    """The arguments that both passes have."""
    batch, heads, block, width = q_BHTK.shape
    return _Call(
        batch=batch, heads=heads, block=block, width=width, first_distance=settings.first_distance,
        longest=max(settings.windows), threads=torch.get_num_threads(), seed=settings.seed,
        scale=1 / math.sqrt(width), dropout=settings.dropout, ramp=settings.ramp,
        **{name: _rows(x, head=1, row=2) for name, x in zip("qkv", (q_BHTK, k_BHTK, v_BHTK), strict=True)},
        each=_heads(settings.windows, past, dpast or past), filled=_start(settings.filled_B),
        mask=_start(mask_HL), spans=_start(spans_BHT), position_keys=_start(p_LK),
    )  # fmt: skip


def _heads(windows: Sequence[int], past: Sequence[Tensor], dpast: Sequence[Tensor]) -> Any:
    """Every head with its rows of the memory, longest windows first: short ones then fill the gaps."""
    heads: list[_Head] = []
    begins = 0
    for kv_BMXK, dkv_BMXK in zip(past, dpast, strict=True):
        size = kv_BMXK.shape[2] // 2
        for place in range(size):
            places = [(x_BMXK, at) for x_BMXK in (kv_BMXK, dkv_BMXK) for at in (place, size + place)]
            rows = [_rows(x_BMXK[:, :, at], row=1) for x_BMXK, at in places]
            window = windows[len(heads)]
            heads.append(_Head(*rows, len(heads), kv_BMXK.shape[1], window, begins))
            begins += _columns(window)
    heads.sort(key=lambda head: -int(head.window))
    return (_Head * len(heads))(*heads)


def _columns(window: int) -> int:
    return -(-window // LANES) * LANES


def _rows(x: Tensor, *, row: int, head: int | None = None) -> _Rows:
    return _Rows(x.data_ptr(), x.stride(0), 0 if head is None else x.stride(head), x.stride(row))


def _start(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _library() -> ctypes.CDLL:
    library = compiled(SOURCE)
    assert library is not None
    return library
