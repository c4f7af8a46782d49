"""The kernels against plain torch in float64: what comes out, every gradient, and what dropout drops.

Without a GPU Triton's interpreter runs them, in float32 and fp16 (its matrix products know no bf16).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan.kernels.contiguous_split import contiguous_split
from longspan.kernels.span_attention import eager, soft_mask
from longspan.kernels.span_attention.mask import EPSILON

from .grouped import (
    Case,
    assert_near,
    head_by_head,
    in_float64,
    keys_and_values,
    tensors_of,
    together,
    with_gradients,
)

gpu = pytest.importorskip("longspan.kernels.span_attention.gpu", reason="needs Triton")
short = gpu.short

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
needs_nvrtc = pytest.mark.skipif(not GPU or short._compiler() is None, reason="needs a GPU and NVRTC")
only_interpreted = pytest.mark.skipif(GPU, reason="Triton's interpreter is for machines without a GPU")
TOLERANCE = {
    torch.float32: 2e-5,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
}
on_every_machine = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="interpreter-float32", marks=only_interpreted),
        *(
            pytest.param(dtype, id=f"cuda-{dtype}".replace("torch.", ""), marks=needs_gpu)
            for dtype in TOLERANCE
        ),
    ],
)

CASES = {
    "one head": Case(windows=((40,),), reaches=(40,)),
    "one query": Case(windows=((3, 50),), reaches=(50,), block=1, positions="shared", spans=(0.0, 43.5)),
    "groups of different reach": Case(
        windows=((5,), (33, 64)), reaches=(5, 64), block=40, width=5, positions="shared"
    ),
    "own windows in a group": Case(windows=((1, 17, 40),), reaches=(40,), batch=1, positions="per head"),
    "a bias of the content": Case(windows=((20, 35),), reaches=(35,), num_persistent=5, biases="content"),
    "a bias of the distance": Case(
        windows=((30,),), reaches=(30,), block=40, positions="shared", biases="position"
    ),
    "biases, and groups of different reach": Case(
        windows=((9,), (35, 64)),
        reaches=(9, 64),
        width=5,
        positions="per head",
        biases="both",
        num_persistent=3,
    ),
    "whole eights, mapped": Case(
        windows=((12, 50),), reaches=(50,), block=16, positions="mapped", biases="both", first_distance=0
    ),
    "few queries, mapped": Case(
        windows=((12, 50),), reaches=(50,), block=3, positions="mapped", biases="both", first_distance=0
    ),
    "spans at 0, at the ramp, at the maximum": Case(
        windows=((16, 16, 48),), reaches=(48,), positions="shared", spans=(0.0, 4.0, 44.0)
    ),
    "spans on whole numbers and between": Case(
        windows=((20, 20), (45,)), reaches=(20, 45), block=35, spans=(7.0, 11.3, 38.75), ramp=3
    ),
    "a ramp of one": Case(windows=((2, 9),), reaches=(9,), batch=1, spans=(1.0, 7.5), ramp=1),
    "no memory": Case(windows=((10,), (50,)), reaches=(0, 0), positions="shared", spans=(3.5, 20.0)),
    "a memory shorter than the windows": Case(
        windows=((12, 30), (60,)), reaches=(7, 33), positions="shared", first_distance=0
    ),
    "a memory that is not filled": Case(
        windows=((35,),),
        reaches=(35,),
        positions="per head",
        biases="both",
        first_distance=0,
        filled=(0, 21),
    ),
    "not filled, with spans and persistent": Case(
        windows=((20, 35),),
        reaches=(35,),
        num_persistent=3,
        spans=(5.0, 30.5),
        first_distance=0,
        filled=(35, 4),
    ),
    "tiles inside the span, and a last tile of few queries that looks as far": Case(
        windows=((150, 180),), reaches=(180,), block=70, batch=1, positions="shared", spans=(140.0, 120.5)
    ),
    "tiles inside the window": Case(
        windows=((160,),), reaches=(130,), block=70, batch=1, first_distance=0, filled=(100,)
    ),
    "persistent": Case(windows=((9, 30),), reaches=(30,), positions="shared", num_persistent=40),
    "persistent that fill their tiles": Case(
        windows=((9, 30),), reaches=(30,), num_persistent=64, spans=(2.0, 20.5)
    ),
    "persistent and spans": Case(
        windows=((9,), (40,)), reaches=(9, 40), positions="shared", num_persistent=3, spans=(2.0, 33.3)
    ),
    "not renormalised": Case(
        windows=((20, 40),), reaches=(40,), num_persistent=3, spans=(8.0, 36.0), renormalise=False
    ),
    "not renormalised, sees itself": Case(
        windows=((25,),),
        reaches=(25,),
        positions="shared",
        spans=(20.5,),
        renormalise=False,
        first_distance=0,
    ),
}

# What only a GPU is quick enough for: tiles of 64, wide heads, sums of gradients in parts.
LARGE_CASES = {
    "long": Case(
        windows=((130,), (290, 300)),
        reaches=(130, 300),
        block=257,
        width=64,
        positions="shared",
        num_persistent=70,
        spans=(60.0, 250.5, 268.0),
        ramp=32,
    ),
    "tiles that are many in a table, and see many keys": Case(
        windows=((700, 700),), reaches=(700,), batch=3, block=520, width=64, positions="shared"
    ),
    "wide heads": Case(
        windows=((100, 140),), reaches=(140,), block=129, width=128, positions="per head", first_distance=0
    ),
    "biases": Case(
        windows=((260, 260),),
        reaches=(130,),
        block=130,
        width=64,
        positions="per head",
        biases="both",
        first_distance=0,
        filled=(130, 70),
    ),
    "many persistent, many rows": Case(
        windows=((8,) * 8,), reaches=(8,), batch=40, block=70, width=16, num_persistent=300, spans=(2.0,) * 8
    ),
}

# Whose windows are short, with all that the kernels for them ask for.
SHORT_CASES = {
    "one group": Case(
        windows=((40, 112),),
        reaches=(112,),
        block=128,
        width=64,
        positions="shared",
        spans=(5.0, 79.5),
        ramp=32,
    ),
    "groups, and a memory shorter than the windows": Case(
        windows=((17,), (48, 100)),
        reaches=(9, 70),
        block=192,
        width=64,
        positions="shared",
        spans=(3.0, 30.0, 91.25),
        ramp=3,
    ),
    "no memory, sees itself": Case(
        windows=((1, 49, 65),),
        reaches=(0,),
        block=64,
        width=64,
        positions="shared",
        spans=(0.0, 44.0, 60.9),
        first_distance=0,
    ),
    "the longest windows": Case(
        windows=((8, 160),),
        reaches=(160,),
        block=256,
        width=64,
        positions="shared",
        spans=(2.5, 120.0),
        ramp=32,
    ),
    "one text, and no distance beyond a piece of 16": Case(
        windows=((16, 1),), reaches=(16,), batch=1, block=64, width=64, positions="shared", spans=(9.5, 0.0)
    ),
    "one distance less than whole pieces": Case(
        windows=((159,), (15,)),
        reaches=(159, 15),
        batch=1,
        block=192,
        width=64,
        positions="shared",
        spans=(120.5, 4.0),
        ramp=32,
    ),
    "a long block": Case(
        windows=((33, 96),),
        reaches=(96,),
        batch=1,
        block=4096,
        width=64,
        positions="shared",
        spans=(11.0, 60.5),
        ramp=32,
    ),
    "a memory longer than the windows": Case(
        windows=((20,), (48, 32)),
        reaches=(20, 300),
        block=64,
        width=64,
        positions="shared",
        spans=(7.0, 40.0, 9.25),
        first_distance=0,
    ),
}

# Whose first groups, as many as the number says, are for the same kernels, and the others for Triton.
MIXED_CASES = {
    "one long head": (
        Case(
            windows=((48, 112, 112), (400,)),
            reaches=(112, 400),
            block=128,
            width=64,
            positions="shared",
            spans=(12.0, 79.5, 60.0, 350.25),
            ramp=32,
        ),
        1,
    ),
    "many groups, and a memory shorter than the windows": (
        Case(
            windows=((17,), (48, 100), (300, 20), (170,)),
            reaches=(9, 70, 150, 33),
            block=192,
            width=64,
            positions="shared",
            spans=(3.0, 30.0, 91.25, 280.0, 11.5, 160.0),
            first_distance=0,
        ),
        2,
    ),
    "short ones after a long one": (
        Case(
            windows=((64,), (161,), (30, 100)),
            reaches=(64, 161, 100),
            batch=1,
            block=64,
            width=64,
            positions="shared",
            spans=(40.5, 150.0, 20.0, 93.0),
        ),
        1,
    ),
}


def drawn(seed: int) -> Case:
    """Any case at all."""
    draw = random.Random(seed)
    windows, at_least = [], 1
    for size in draw.choice([(1,), (2,), (1, 2)]):
        windows.append(tuple(sorted(draw.randint(at_least, at_least + 35) for _ in range(size))))
        at_least = windows[-1][-1]
    reaches = tuple(draw.choice([max(group), draw.randint(0, max(group))]) for group in windows)
    batch, first = draw.choice([1, 2]), draw.choice([0, 1])
    filled = tuple(draw.randint(0, max(reaches)) for _ in range(batch))
    ramp = draw.choice([1, 4])
    spans = [draw.uniform(0, max(0, window - ramp)) for group in windows for window in group]
    return Case(
        windows=tuple(windows),
        reaches=reaches,
        batch=batch,
        block=draw.choice([1, 3, 16, 17, 33, 40]),
        width=draw.choice([3, 8, 16]),
        positions=(positions := draw.choice(["none", "shared", "per head", "mapped"])),
        biases=draw.choice(["none", "content"] if positions == "none" else ["none", "content", "both"]),
        num_persistent=draw.choice([0, 0, 5]),
        spans=draw.choice([None, tuple(spans), tuple(map(round, spans))]),
        ramp=ramp,
        renormalise=draw.random() < 0.7,
        first_distance=first,
        filled=filled if first == 0 and draw.random() < 0.5 else None,
    )


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In deterministic mode torch fills with NaN what nobody wrote yet: reading it shows."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(case: Case, dtype: torch.dtype) -> None:
    tensors = tensors_of(case, dtype, DEVICE)
    exact = in_float64(tensors)
    expected = with_gradients(head_by_head(eager.span_attention, case, exact, case.flat_windows), exact)
    found = with_gradients(together(gpu.span_attention, case, tensors), tensors)
    assert found["out"].dtype == dtype
    usual = None
    if dtype != torch.float32:  # where sums nearly cancel, plain torch does no better in half precision
        usual = with_gradients(head_by_head(eager.span_attention, case, tensors, case.flat_windows), tensors)
    assert_near(found, expected, TOLERANCE[dtype], usual)


@on_every_machine
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernels_equal_plain_torch(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@on_every_machine
@pytest.mark.parametrize("seed", range(8))
def test_kernels_equal_plain_torch_whatever_is_asked(seed: int, dtype: torch.dtype) -> None:
    check(drawn(seed), dtype)


@pytest.mark.parametrize(
    "name",
    [
        "one query",
        "own windows in a group",
        "biases, and groups of different reach",
        "no memory",
        "persistent and spans",
        "not renormalised, sees itself",
    ],
)
def test_weights_made_anew_are_those_that_were_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout they are kept, unless heads look far."""
    tensors, found = tensors_of(CASES[name], torch.float32, DEVICE), []
    for far in (gpu.FAR, 1):
        monkeypatch.setattr(gpu, "FAR", far)
        torch.manual_seed(0)
        found.append(with_gradients(together(gpu.span_attention, CASES[name], tensors, dropout=0.4), tensors))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_past_that_wants_no_gradient() -> None:
    case = Case(windows=((20, 45),), reaches=(45,), block=40, positions="shared", spans=(9.0, 30.5))
    torch.manual_seed(0)
    tensors = tensors_of(case, torch.float32, DEVICE)
    expected = with_gradients(together(gpu.span_attention, case, tensors), tensors)
    given = tensors | {"past0": tensors["past0"].detach()}
    wanted = {name: tensor for name, tensor in tensors.items() if name != "past0"}
    found = with_gradients(together(gpu.span_attention, case, given), wanted)
    assert found.keys() == expected.keys() - {"past0"}
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_windows_that_follow_spans() -> None:
    """With the window of a whole group a head visits only what its span needs, as if it were given that."""
    case = Case(windows=((112, 112),), reaches=(112,), block=40, positions="shared", spans=(5.0, 60.5))
    own = replace(case, windows=((16, 80),))  # span, ramp of 4 and one more, in steps of 16
    torch.manual_seed(0)
    tensors = tensors_of(case, torch.float32, DEVICE)
    found = with_gradients(together(gpu.span_attention, case, tensors, windows_follow_spans=True), tensors)
    expected = with_gradients(together(gpu.span_attention, own, tensors), tensors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        Case(windows=((9, 20),), reaches=(20,), block=16, positions="per head", biases="both"),
        Case(windows=((9,), (40, 20)), reaches=(9, 40), positions="shared", spans=(4.0, 33.0, 10.5)),
    ],
    ids=["biased", "parted"],
)
@pytest.mark.usefixtures("short_in_triton")
def test_gradients_of_queries_lie_beside_those_of_keys_and_values(case: Case) -> None:
    """As they were projected: nobody has to put them together."""
    tensors = tensors_of(case, torch.float32, DEVICE)
    rows_BTRK = torch.randn(case.batch, case.block, 3 * case.num_heads, case.width, device=DEVICE)
    parts = contiguous_split(rows_BTRK.requires_grad_(), [case.num_heads] * 3, dim=2)
    gradients: dict[str, Tensor] = {}
    for name, part_BTHK in zip(("q", "k", "v"), parts, strict=True):
        part_BTHK.register_hook(partial(gradients.__setitem__, name))
        tensors[name] = part_BTHK.transpose(1, 2)
    together(gpu.span_attention, case, tensors).sum().backward()
    assert rows_BTRK.grad is not None
    assert gradients.keys() == {"q", "k", "v"}
    for gradient in gradients.values():
        assert gradient.untyped_storage().data_ptr() == rows_BTRK.grad.untyped_storage().data_ptr()


def test_queries_are_never_mapped_to_the_width_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of such rows need more room than there is: 388 KB of a GPU in float32 and a width of 1024."""
    case = Case(windows=((12, 50),), reaches=(50,), block=3, positions="mapped", biases="both")
    made, widths = gpu.distance_table, []
    monkeypatch.setattr(
        gpu, "distance_table", lambda asked, *of: widths.append(asked.shape[-1]) or made(asked, *of)
    )
    together(gpu.span_attention, case, tensors_of(case, torch.float32, DEVICE))
    assert widths == [case.width]


def test_tiny_mass_inside_the_span_shows_the_epsilon() -> None:
    """A key out of the span takes all but e^-18 of the softmax, about as much as the 1e-8 and too little for
    fp16."""
    case = Case(windows=((2,),), reaches=(2,), batch=1, block=1, width=1, spans=(0.0,), ramp=1)
    tensors = tensors_of(case, torch.float32, DEVICE)
    with torch.no_grad():
        tensors["q"].fill_(1)
        tensors["past0"][0, :, :, 0] = torch.tensor([[18.0, 3.0], [0.0, 1.0]])
    exact = in_float64(tensors)
    expected = with_gradients(head_by_head(eager.span_attention, case, exact, [2]), exact)
    mass = 1 / (1 + math.exp(18))
    assert expected["out"].item() == pytest.approx(mass / (mass + EPSILON), rel=1e-9)
    found = with_gradients(together(gpu.span_attention, case, tensors), tensors)
    assert_near(found, expected, TOLERANCE[torch.float32])


@only_interpreted
@pytest.mark.parametrize("name", ["persistent and spans", "biases, and groups of different reach"])
def test_half_precision_sums_in_float32(name: str) -> None:
    check(CASES[name], torch.float16)


@needs_gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", LARGE_CASES.values(), ids=LARGE_CASES.keys())
def test_large_cases_on_cuda(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.fixture
def heads_by(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """How many heads every backward pass had, by the kind of kernels."""
    counted: dict[str, list[int]] = {}

    def counting(kind: str, backward: Callable[..., Any]) -> Callable[..., Any]:
        def counts(dout_BHTK: Tensor, *given: Any) -> Any:
            counted.setdefault(kind, []).append(dout_BHTK.shape[1])
            return backward(dout_BHTK, *given)

        return counts

    monkeypatch.setattr(short, "backward", counting("short", short.backward))
    monkeypatch.setattr(gpu, "_backward_by_triton", counting("triton", gpu._backward_by_triton))
    return counted


def parted_heads(case: Case, num_short: int) -> dict[str, list[int]]:
    """What `heads_by` has seen when so many groups went to the kernels for short windows."""
    of_short = sum(map(len, case.windows[:num_short]))
    return {"short": [of_short], "triton": [case.num_heads - of_short]}


halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@needs_nvrtc
@halves
@pytest.mark.parametrize("case", SHORT_CASES.values(), ids=SHORT_CASES.keys())
def test_short_windows(case: Case, dtype: torch.dtype, heads_by: dict[str, list[int]]) -> None:
    check(case, dtype)
    assert heads_by == {"short": [case.num_heads]}


@needs_nvrtc
@halves
@pytest.mark.parametrize("case", SHORT_CASES.values(), ids=SHORT_CASES.keys())
def test_short_windows_drop_what_the_hash_says(
    case: Case, dtype: torch.dtype, heads_by: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_dropout(case, dtype, monkeypatch)
    assert heads_by == {"short": [case.num_heads]}


@needs_nvrtc
@halves
@pytest.mark.parametrize("name", ["one group", "the longest windows", "a long block"])
def test_short_windows_where_a_program_takes_a_whole_text(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SHORT_CASES[name]
    monkeypatch.setattr(short, "_steps", lambda texts, steps, programs: steps)
    check(replace(case, block=max(case.block, 704)), dtype)


@needs_nvrtc
@halves
@pytest.mark.parametrize(("case", "num_short"), MIXED_CASES.values(), ids=MIXED_CASES.keys())
def test_mixed_windows(
    case: Case, num_short: int, dtype: torch.dtype, heads_by: dict[str, list[int]]
) -> None:
    check(case, dtype)
    assert heads_by == parted_heads(case, num_short)


@needs_nvrtc
@halves
@pytest.mark.parametrize(("case", "num_short"), MIXED_CASES.values(), ids=MIXED_CASES.keys())
def test_mixed_windows_drop_what_the_hash_says(
    case: Case,
    num_short: int,
    dtype: torch.dtype,
    heads_by: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_dropout(case, dtype, monkeypatch, num_short)
    assert heads_by == parted_heads(case, num_short)


@pytest.fixture
def short_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows up to 20 are short, and Triton stands in for the kernels for them: heads part without a GPU."""
    made = []

    def of_triton(given: Any, longest_window: int, longest_reach: int) -> tuple[Any, Any]:
        batch, _, block, _ = given.q_BHTK.shape
        columns = given.heads[:, 7].tolist()
        numbers = 2 * gpu.MARGIN + batch * gpu.whole(block) * sum(columns)
        sizes = gpu.Sizes(numbers, sum(columns), max(columns))
        keys = given.position_keys
        whole = gpu.Given(*given[:4], None, None, keys, keys, None, None, given.spans_H, None)
        return whole, gpu.Layout(given.heads, sizes, longest_reach, longest_window)

    def options_of(options: Any) -> Any:
        return gpu.Options(renormalise=True, **options._asdict())

    def forward(given: Any, out_BHTK: Tensor, longest_window: int, options: Any) -> Tensor:
        whole, layout = of_triton(given, longest_window, 0)
        made.append(gpu._forward_by_triton(whole, out_BHTK, given.seed, layout, options_of(options)))
        return made[-1].lse_BHT

    def backward(
        dout_BHTK: Tensor, given: Any, out_BHTK: Tensor, lse_BHT: Tensor, dqkv_BHTK: list[Tensor],
        dpast: Tensor | None, longest_window: int, longest_reach: int, options: Any,
    ) -> Any:  # fmt: skip
        whole, layout = of_triton(given, longest_window, longest_reach)
        gradients = triton_backward(
            dout_BHTK, whole, made.pop()._replace(lse_BHT=lse_BHT), out_BHTK, given.seed, dqkv_BHTK, dpast,
            layout, options_of(options),
        )  # fmt: skip
        return short.Sums(gradients.position_keys, gradients.spans_H)

    triton_backward = gpu._backward_by_triton
    monkeypatch.setattr(short, "LONGEST", 20)
    monkeypatch.setattr(short, "takes", lambda given, *_: given.position_keys.dim() == 2)
    monkeypatch.setattr(short, "forward", forward)
    monkeypatch.setattr(short, "backward", backward)


PARTED_CASES = {
    "one long head": (
        Case(windows=((9, 20), (45,)), reaches=(20, 45), positions="shared", spans=(4.0, 13.5, 38.75)),
        1,
    ),
    "many groups, and a memory shorter than the windows": (
        Case(
            windows=((5,), (20, 7), (50, 12), (21,)),
            reaches=(2, 13, 30, 0),
            batch=3,
            positions="shared",
            spans=(1.0, 15.0, 2.5, 44.0, 6.0, 16.5),
            first_distance=0,
        ),
        2,
    ),
    "short ones after a long one": (
        Case(
            windows=((8,), (21,), (3, 20)),
            reaches=(8, 21, 20),
            block=16,
            positions="shared",
            spans=(3.5, 15.0, 1.0, 14.0),
        ),
        1,
    ),
}


@pytest.mark.usefixtures("short_in_triton")
@pytest.mark.parametrize(("case", "num_short"), PARTED_CASES.values(), ids=PARTED_CASES.keys())
def test_parted_heads(case: Case, num_short: int, heads_by: dict[str, list[int]]) -> None:
    check(case, torch.float32)
    assert heads_by == parted_heads(case, num_short)


@pytest.mark.usefixtures("short_in_triton")
@pytest.mark.parametrize(("case", "num_short"), PARTED_CASES.values(), ids=PARTED_CASES.keys())
def test_parted_heads_drop_what_the_hash_says(
    case: Case, num_short: int, heads_by: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_dropout(case, torch.float32, monkeypatch, num_short)
    assert heads_by == parted_heads(case, num_short)


@pytest.mark.usefixtures("short_in_triton")
@pytest.mark.parametrize(
    "changed",
    [
        {"windows": ((21, 9), (20,))},
        {"positions": "per head"},
        {"biases": "content"},
        {"num_persistent": 3},
        {"renormalise": False},
        {"spans": None},
        {"filled": (20, 7), "first_distance": 0},
    ],
    ids=str,
)
def test_heads_that_do_not_part(changed: dict[str, Any], heads_by: dict[str, list[int]]) -> None:
    """The first group looks far, or the heads have what there are no kernels for short windows for."""
    case = replace(PARTED_CASES["one long head"][0], **changed)
    check(case, torch.float32)
    assert heads_by == {"triton": [3]}


def test_a_gpu_that_nvrtc_does_not_know_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(file: str, options: list[str]) -> bytes:
        raise RuntimeError(f"unknown: {options[0]}")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (99, 1))
    monkeypatch.setattr(short, "_compiler", object)
    monkeypatch.setattr(short, "_machine_code", refuses)
    with pytest.warns(UserWarning, match="left to Triton, which takes longer: unknown: .*sm_991"):
        assert short._compiled.__wrapped__(0, 112, 1, True, "bf16") is None


@needs_nvrtc
def test_short_windows_follow_spans(heads_by: dict[str, list[int]]) -> None:
    case = replace(SHORT_CASES["one group"], windows=((112, 112),))
    own = replace(case, windows=((38, 112),))  # up to where the soft mask ends
    tensors = tensors_of(case, torch.bfloat16, DEVICE)
    found = with_gradients(together(gpu.span_attention, case, tensors, windows_follow_spans=True), tensors)
    expected = with_gradients(together(gpu.span_attention, own, tensors), tensors)
    assert heads_by == {"short": [2, 2]}
    assert_near(found, expected, 1e-6)


@needs_nvrtc
def test_a_past_before_short_windows_that_wants_no_gradient(heads_by: dict[str, list[int]]) -> None:
    case = SHORT_CASES["one group"]
    tensors = tensors_of(case, torch.bfloat16, DEVICE)
    expected = with_gradients(together(gpu.span_attention, case, tensors), tensors)
    given = tensors | {"past0": tensors["past0"].detach()}
    wanted = {name: tensor for name, tensor in tensors.items() if name != "past0"}
    found = with_gradients(together(gpu.span_attention, case, given), wanted)
    assert heads_by == {"short": [2, 2]}
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@needs_nvrtc
def test_gradients_that_come_to_short_windows_in_rows_that_begin_anywhere(
    heads_by: dict[str, list[int]],
) -> None:
    case = SHORT_CASES["one group"]
    tensors = tensors_of(case, torch.bfloat16, DEVICE)
    out_BHTK = together(gpu.span_attention, case, tensors)
    wider = torch.randn(*out_BHTK.shape[:3], case.width + 1, dtype=out_BHTK.dtype, device=DEVICE)
    dout_BHTK = wider[..., 1:]
    assert not short._lies_well(dout_BHTK)
    found, expected = (
        torch.autograd.grad(out_BHTK, list(tensors.values()), given, retain_graph=True)
        for given in (dout_BHTK, dout_BHTK.contiguous())
    )
    assert heads_by == {"short": [2, 2]}
    for name, one, other in zip(tensors, found, expected, strict=True):
        assert torch.equal(one, other), name


def mixed(x: np.ndarray) -> np.ndarray:
    """The hash of a query's row, of 32 bits: products that wrap around, shifted onto themselves."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def kept_BHTX(case: Case, seed: int, dropout: float, window: int) -> Tensor:
    """Which weights are kept: those of the distances, nearest first, and then those of the persistent.

    A weight is dropped if the hash of its query's row (of all B x H x T) and its key's position, counted from
    the block's beginning, lies among the lowest. Slots begin at position 2^30.
    """
    shape = (case.batch, case.num_heads, case.block)
    row_BHT = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    distance_W = case.first_distance + np.arange(window)
    position_TW = np.arange(case.block)[:, None] - distance_W
    persistent_TP = np.broadcast_to(2**30 + np.arange(case.num_persistent), (case.block, case.num_persistent))
    column_TX = np.concatenate([position_TW, persistent_TP], axis=1).astype(np.int32).view(np.uint32)
    hashed = (mixed(row_BHT ^ np.uint32(seed))[..., None] ^ column_TX) * np.uint32(0x7FEB352D)
    hashed = (hashed ^ (hashed >> np.uint32(15))) * np.uint32(0x846CA68B)
    return torch.from_numpy(hashed.astype(np.int64) >= int(dropout * 2**32))


def dense(case: Case, tensors: dict[str, Tensor], kept: Tensor, dropout: float) -> Tensor:
    """Span attention through a whole table of weights, of which those not `kept` are dropped."""
    out = []
    longest = kept.shape[-1] - case.num_persistent
    for head, ((k_BSK, v_BSK), window) in enumerate(
        zip(keys_and_values(case, tensors), case.flat_windows, strict=True)
    ):
        t_T1 = torch.arange(case.block, device=k_BSK.device)[:, None]
        i_W = torch.arange(window, device=k_BSK.device)
        # Zeros stand for as many rows as a window has before the first key.
        row_TW = k_BSK.shape[1] - case.block + t_T1 - case.first_distance - i_W + window
        k_BTWK, v_BTWK = (
            torch.nn.functional.pad(x_BSK, (0, 0, window, 0))[:, row_TW] for x_BSK in (k_BSK, v_BSK)
        )
        q_BTK = tensors["q"][:, head]
        score_BTX = torch.einsum("btk,btwk->btw", q_BTK, k_BTWK)
        score_BTX = score_BTX + q_BTK @ tensors["position_keys"][:window].mT
        if case.num_persistent:
            score_BTX = torch.cat([score_BTX, q_BTK @ tensors["persistent_k"][head].mT], dim=-1)
        weight_BTX = torch.softmax(score_BTX / math.sqrt(case.width), dim=-1)
        mask_1W = soft_mask(tensors["spans_H"][head : head + 1], case.ramp, window)
        weight_BTX = weight_BTX * torch.nn.functional.pad(mask_1W, (0, case.num_persistent), value=1.0)
        if case.renormalise:
            weight_BTX = weight_BTX / (weight_BTX.sum(-1, keepdim=True) + EPSILON)
        kept_BTX = torch.cat([kept[:, head, :, :window], kept[:, head, :, longest:]], dim=-1)
        weight_BTX = weight_BTX * kept_BTX / (1 - dropout)
        near_BTK = torch.einsum("btw,btwk->btk", weight_BTX[..., :window], v_BTWK)
        slots_BTK = weight_BTX[..., window:] @ tensors["persistent_v"][head] if case.num_persistent else 0
        out.append(near_BTK + slots_BTK)
    return torch.stack(out, dim=1)


def check_dropout(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, num_short: int = 0
) -> None:
    """Where groups are parted, `num_short` of them before the others, both sides have seeds of their own."""
    dropout, sides = 0.3, [side for side in (case.windows[:num_short], case.windows[num_short:]) if side]
    seeds = [1234567, 7654321][: len(sides)]
    left = iter(seeds)
    monkeypatch.setattr(
        gpu, "new_seed", lambda device: torch.tensor([next(left)], dtype=torch.int32, device=device)
    )
    tensors = tensors_of(case, dtype, DEVICE)
    exact = in_float64(tensors)
    of_sides = [
        kept_BHTX(replace(case, windows=side), seed, dropout, max(case.flat_windows))
        for side, seed in zip(sides, seeds, strict=True)
    ]
    kept = torch.cat(of_sides, dim=1).to(DEVICE)
    expected = with_gradients(dense(case, exact, kept, dropout), exact)
    found = with_gradients(together(gpu.span_attention, case, tensors, dropout=dropout), tensors)
    assert next(left, None) is None
    assert_near(found, expected, TOLERANCE[dtype])


@on_every_machine
@pytest.mark.parametrize("renormalise", [True, False])
def test_dropout_drops_what_its_hash_says_in_both_passes(
    renormalise: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        windows=((9,), (30, 40)),
        reaches=(9, 40),
        positions="shared",
        num_persistent=5,
        spans=(4.0, 20.5, 36.0),
        renormalise=renormalise,
    )
    check_dropout(case, dtype, monkeypatch)


def weights_seen(dropout: float) -> Tensor:
    """All weights of equal scores, [B, H, T, distance], read off values that are rows of the unit matrix."""
    case = Case(windows=((64, 64),), reaches=(64,), block=64, width=128)
    tensors = tensors_of(case, torch.float32, DEVICE)
    with torch.no_grad():
        tensors["q"].zero_()
        unit = torch.eye(128, device=DEVICE)
        tensors["past0"][:, :, 2:] = unit[:64, None]
        tensors["v"][:] = unit[64:]
        out_BHTK = together(gpu.span_attention, case, tensors, dropout=dropout)
    return torch.stack([out_BHTK[:, :, t, t : t + 64].flip(-1) for t in range(64)], dim=2).cpu()


def test_dropout_keeps_its_share_and_knows_no_neighbours() -> None:
    assert torch.allclose(weights_seen(0.0), torch.tensor(1 / 64))
    torch.manual_seed(1)
    first, second = weights_seen(0.25), weights_seen(0.25)
    torch.manual_seed(1)
    assert torch.equal(first, weights_seen(0.25)), "the same seed must drop the same"
    kept = (first > 0).double()
    assert torch.allclose(first[first > 0], torch.tensor(1 / 64 / 0.75))
    noise = kept.numel() ** -0.5
    assert abs(kept.mean() - 0.75) < 4 * 0.75**0.5 * 0.25**0.5 * noise

    def correlation(a: Tensor, b: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])

    others = {
        "the next draw": (kept, (second > 0).double()),
        "the next row of the batch": (kept[0], kept[1]),
        "the next head": (kept[:, 0], kept[:, 1]),
        "the next query": (kept[:, :, 1:], kept[:, :, :-1]),
        "the next distance": (kept[..., 1:], kept[..., :-1]),
        "the next query at the same key": (kept[:, :, 1:, 1:], kept[:, :, :-1, :-1]),
    }
    for name, pair in others.items():
        assert abs(correlation(*pair)) < 6 * noise, name
    assert kept.mean((0, 1, 2)).std() < 2 * 0.75**0.5 * 0.25**0.5 * 256**-0.5, "every distance alike"
