"""The table of distances and its gradients against loops over queries and distances, in float64."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

Array: TypeAlias = np.ndarray[Any, Any]

gpu = pytest.importorskip("longspan.kernels.span_attention.gpu", reason="needs Triton")
relative_bias = pytest.importorskip("longspan.kernels.span_attention.relative_bias", reason="needs Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, WIDTH = 2, 5
WINDOWS, PASTS = (3, 20, 70), ((20, 2), (70, 1))  # heads of a group share the longer window
COLUMNS = [24 + 8, 24 + 8, 72 + 8]  # rounded up to 8, and 8 more


def places(block: int, length: int, first_distance: int) -> list[tuple[int, int, int, int, int, int]]:
    """Head, text, query, its row, a column, and the row of the position keys that belongs there."""
    rows = -(-block // 8) * 8
    found = []
    for head, columns in enumerate(COLUMNS):
        for text in range(BATCH):
            for t in range(block):
                for column in range(columns):
                    i = columns - 8 + t % 8 - column - first_distance
                    if 0 <= i < length:
                        found.append((head, text, t, text * rows + t, column, i))
    return found


def in_numpy(tensor: Tensor) -> Array:
    """A copy in float64. Loops over single numbers are much faster in NumPy."""
    return tensor.double().cpu().numpy().copy()


@pytest.mark.parametrize("first_distance", [0, 1])
@pytest.mark.parametrize("length", [13, 100])  # fewer and more than the window has distances
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("block", [8, 13])
def test_table_and_gradients(block: int, per_head: bool, length: int, first_distance: int) -> None:
    torch.manual_seed(0)
    rows = -(-block // 8) * 8
    layout = gpu._layout(WINDOWS, PASTS, BATCH, block, torch.device(DEVICE))
    asked = torch.randn(BATCH, block, 3, WIDTH, device=DEVICE).transpose(1, 2)
    keys = torch.randn(*([3] if per_head else []), length, WIDTH, device=DEVICE)
    shared = (layout.heads, layout.table, first_distance)

    begins, columns_of = layout.heads[:, 6:].t().tolist()
    assert columns_of == COLUMNS

    def of_head(numbers: Array, head: int) -> Array:
        begin, columns = begins[head], COLUMNS[head]
        return numbers[begin : begin + BATCH * rows * columns].reshape(-1, columns)

    table = relative_bias.distance_table(asked, keys, *shared)
    dtable = torch.randn(layout.table.numbers, device=DEVICE)
    before = torch.randn(BATCH, block, 3, WIDTH, device=DEVICE).transpose(1, 2)
    dasked, expected_dasked = before.clone(), in_numpy(before)
    expected_dkeys = np.zeros(keys.shape)
    dkeys = relative_bias.distance_gradients(
        dtable, asked, keys, *shared, scale=0.5, dasked_BHTK=dasked, dtype=torch.float32
    )
    expected_table = np.zeros(table.shape)
    all_q, all_p, all_d = (in_numpy(tensor) for tensor in (asked, keys, 0.5 * dtable.double()))
    for head, text, t, row, column, i in places(block, length, first_distance):
        at = (head, i) if per_head else (i,)
        q, p = all_q[text, head, t], all_p[at]
        of_head(expected_table, head)[row, column] = q @ p
        d = of_head(all_d, head)[row, column]
        expected_dasked[text, head, t] += d * p
        expected_dkeys[at] += d * q
    for head in range(3):
        there = np.arange(BATCH * rows) % rows < block
        found, expected = (of_head(numbers, head)[there] for numbers in (in_numpy(table), expected_table))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(in_numpy(dasked), expected_dasked, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(in_numpy(dkeys), expected_dkeys, rtol=1e-5, atol=1e-5)


def test_gradients_of_position_keys_are_as_precise_as_they_want_to_be() -> None:
    """In float32 from numbers in half precision: a thousand ones and a small number."""
    layout = gpu._layout((8,), ((8, 1),), 1, 1024, torch.device(DEVICE))
    asked = torch.ones(1, 1, 1024, WIDTH, device=DEVICE, dtype=torch.float16)
    asked[0, 0, 0] = 2**-6
    keys = torch.zeros(8, WIDTH, device=DEVICE, dtype=torch.float16)
    dtable = torch.ones(layout.table.numbers, device=DEVICE, dtype=torch.float16)
    dkeys = relative_bias.distance_gradients(
        dtable, asked, keys, layout.heads, layout.table, 1,
        scale=1.0, dasked_BHTK=torch.zeros_like(asked), dtype=torch.float32,
    )  # fmt: skip
    assert torch.equal(dkeys, torch.full_like(dkeys, 1023 + 2**-6))
