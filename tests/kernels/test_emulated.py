"""The kernels for short windows against plain torch in float64, where no GPU runs them: emulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from . import test_fused
from .emulated_cuda import emulated
from .grouped import Case, assert_near, tensors_of, together, with_gradients
from .test_fused import SHORT_CASES, check, check_dropout, fused, only_interpreted, short

pytestmark = [
    only_interpreted,
    pytest.mark.skipif(not emulated.IS_POSSIBLE, reason="needs a C++ compiler"),
]
in_emulator = pytest.mark.usefixtures("_emulated")
_poisoned = test_fused._poisoned

# Programs go along all of a text, more than twice around a ring of rows, and end with half a step.
LONG = replace(SHORT_CASES["one group"], batch=1, block=704)
# The same, but queries come late, for there is no room for them while others are worked on.
LONGEST = replace(LONG, windows=((8, 160),), reaches=(60,), spans=(2.5, 120.0))
NEAR = SHORT_CASES["one text, and no distance beyond a piece of 16"]
SEES_ITSELF = Case(
    windows=((1, 20), (48, 33)),
    reaches=(7, 150),
    block=64,
    width=64,
    positions="shared",
    spans=(0.0, 7.0, 40.0, 9.25),
    first_distance=0,
)
NO_MEMORY = replace(SEES_ITSELF, windows=((1, 20), (48, 130)), reaches=(0, 0))


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernels = Mock(wraps=emulated.kernels)
    monkeypatch.setattr(short, "_kernels", kernels)
    monkeypatch.setattr(short, "takes", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: emulated.GPU)
    yield
    kernels.assert_called()


@in_emulator
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(LONGEST, torch.float16, id="the longest windows"),
        pytest.param(NEAR, torch.bfloat16, id="no distance beyond a piece of 16"),
        pytest.param(NO_MEMORY, torch.bfloat16, id="no memory"),
    ],
)
def test_out_and_gradients(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@in_emulator
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(LONG, torch.bfloat16, id="a long block"),
        pytest.param(SEES_ITSELF, torch.float16, id="memories shorter and longer than the windows"),
    ],
)
def test_dropout(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check_dropout(case, dtype, monkeypatch)


@in_emulator
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(LONGEST, torch.float16, id="sums that grow too large for their first base"),
        pytest.param(
            replace(NO_MEMORY, spans=(0.0, 0.0, 0.0, 7.0), ramp=3),
            torch.bfloat16,
            id="most of the softmax where the soft mask is 0",
        ),
    ],
)
def test_sharp_scores(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_large_keys(*given: Any) -> dict[str, Tensor]:
        tensors = tensors_of(*given)
        tensors["k"].data *= 10
        return tensors

    monkeypatch.setattr(test_fused, "tensors_of", with_large_keys)
    check(case, dtype)


@in_emulator
def test_windows_that_follow_spans() -> None:
    case = replace(LONG, windows=((112, 112),), block=128)
    own = replace(case, windows=((38, 112),))  # up to where the soft mask ends
    tensors, results = tensors_of(case, torch.bfloat16), []
    for each, follow in ((case, True), (own, False)):
        torch.manual_seed(0)
        out = together(fused.span_attention, each, tensors, windows_follow_spans=follow, dropout=0.3)
        results.append(with_gradients(out, tensors))
    found, expected = results
    assert_near(found, expected, 1e-6)


@in_emulator
def test_a_past_that_wants_no_gradient() -> None:
    tensors = tensors_of(NEAR, torch.bfloat16)
    expected = with_gradients(together(fused.span_attention, NEAR, tensors), tensors)
    given = tensors | {"past0": tensors["past0"].detach()}
    wanted = {name: tensor for name, tensor in tensors.items() if name != "past0"}
    found = with_gradients(together(fused.span_attention, NEAR, given), wanted)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


# A program of two warps does what no kernel may do.
WRONG = """
extern "C" __global__ void two_write_a_place(u32 *) { to_shared32(shared_memory(), threadIdx.x); }
extern "C" __global__ void reads_what_a_neighbour_wrote(u32 *) {
    to_shared32(shared_memory() + 4 * threadIdx.x, 0);
    shared32(shared_memory() + 4 * (threadIdx.x ^ 1));
}
extern "C" __global__ void reads_what_another_warp_wrote(u32 *) {
    to_shared32(shared_memory() + 4 * threadIdx.x, 0);
    __syncwarp();
    shared32(shared_memory() + 4 * (threadIdx.x ^ 32));
}
extern "C" __global__ void reads_beyond(u32 *) { shared32(shared_memory() + 128 * threadIdx.x); }
extern "C" __global__ void leaves_a_copy(u32 *x) {
    copy16(shared_memory() + 16 * threadIdx.x, x, true);
    wait_copies<0>();
}
extern "C" __global__ void parts(u32 *) {
    if (threadIdx.x & 1) __syncwarp();
    else turned(0);
}
extern "C" __global__ void is_stuck(u32 *) { if (threadIdx.x) __syncthreads(); }
"""
FOUND = {
    "two_write_a_place": "writes where another thread just wrote",
    # Whoever comes first.
    "reads_what_a_neighbour_wrote": "where another thread just read|what another thread just wrote",
    "reads_what_another_warp_wrote": "where another thread just read|what another thread just wrote",
    "reads_beyond": "beyond shared memory",
    "leaves_a_copy": "ends with copies on their way",
    "parts": "but others at a",
    "is_stuck": "waits for others in vain",
}
# What is read while its copy is on the way, or was never written, is NaN.
UNSETTLED = """
extern "C" __global__ void unsettled(u32 *x) {
    const u32 at = shared_memory() + 16 * threadIdx.x;
    copy16(at, x, true);
    copies_end();
    copy16(at + 1024, x, true);
    copies_end();
    const u32 early = shared32(at);
    wait_copies<1>();
    const u32 in_time = shared32(at), other = shared32(at + 1024);
    wait_copies<0>();
    if (threadIdx.x == 0) {
        x[4] = early;
        x[5] = in_time;
        x[6] = other;
        x[7] = shared32(at + 2048);
    }
}
"""


def test_what_the_emulator_finds() -> None:
    names = [*FOUND, "unsettled"]
    source = emulated.INSTRUCTIONS.read_text() + WRONG + UNSETTLED
    launches = emulated.compiled(source, names, ["-DIS_BF16"])
    kernels = [
        emulated.Kernel(*named, threads=64, shared_memory=4096) for named in zip(names, launches, strict=True)
    ]
    numbers = torch.tensor([3, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int32)
    for kernel, found in zip(kernels, FOUND.values(), strict=False):
        with pytest.raises(AssertionError, match=found):
            kernel((1,), numbers)
    kernels[-1]((1,), numbers)
    assert numbers[4:].tolist() == [-1, 3, -1, -1]
