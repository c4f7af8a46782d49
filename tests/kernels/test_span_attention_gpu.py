"""The kernels against plain torch in float64: what comes out, every gradient, and what dropout drops.

Without a GPU Triton's interpreter runs them, in float32 and fp16 (its matrix products know no bf16).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan.kernels.layout import contiguous_split
from longspan.kernels.span_attention import eager, soft_mask
from longspan.kernels.span_attention.context import EPSILON

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

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
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
    "spans of every query": Case(
        windows=((48, 16), (150,)),
        reaches=(48, 150),
        block=70,
        positions="shared",
        spans=(44.0, 5.5, 140.0),
        dynamic=True,
    ),
    "spans of every query, with all other terms": Case(
        windows=((20, 35),),
        reaches=(35,),
        num_persistent=3,
        positions="per head",
        biases="both",
        spans=(5.0, 30.5),
        dynamic=True,
        first_distance=0,
        filled=(35, 4),
    ),
    "spans of every query, not renormalised": Case(
        windows=((20, 35),),
        reaches=(35,),
        spans=(5.0, 30.5),
        dynamic=True,
        renormalise=False,
    ),
    "long spans of every query, without positions": Case(
        windows=((180,),),
        reaches=(130,),
        block=70,
        batch=1,
        spans=(160.0,),
        dynamic=True,
        first_distance=0,
        filled=(100,),
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
    "not filled, with spans and persistent vectors": Case(
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
    "persistent vectors": Case(windows=((9, 30),), reaches=(30,), positions="shared", num_persistent=40),
    "persistent vectors that fill their tiles": Case(
        windows=((9, 30),), reaches=(30,), num_persistent=64, spans=(2.0, 20.5)
    ),
    "persistent vectors and spans": Case(
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
    "many persistent vectors, many rows": Case(
        windows=((8,) * 8,), reaches=(8,), batch=40, block=70, width=16, num_persistent=300, spans=(2.0,) * 8
    ),
}


def in_time(case: Case) -> Case:
    """Triton's interpreter is slow: it runs one text of two, except where each is filled in another way."""
    return case if GPU or case.filled is not None else replace(case, batch=1)


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
        dynamic=seed % 2 == 1,
        ramp=ramp,
        renormalise=draw.random() < 0.7,
        first_distance=first,
        filled=filled if first == 0 and draw.random() < 0.5 else None,
    )


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In deterministic mode torch fills with NaN what was not written yet: reading it shows."""
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
    check(in_time(case), dtype)


@on_every_machine
@pytest.mark.parametrize("seed", range(8))
def test_kernels_equal_plain_torch_whatever_is_asked(seed: int, dtype: torch.dtype) -> None:
    check(drawn(seed), dtype)


def test_a_past_that_wants_no_gradient() -> None:
    case = in_time(Case(windows=((20, 45),), reaches=(45,), positions="shared", spans=(9.0, 30.5)))
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
    case = in_time(Case(windows=((112, 112),), reaches=(112,), positions="shared", spans=(5.0, 60.5)))
    own = replace(case, windows=((16, 80),))  # span, ramp of 4 and one more, in steps of 16
    torch.manual_seed(0)
    tensors = tensors_of(case, torch.float32, DEVICE)
    found = with_gradients(together(gpu.span_attention, case, tensors, windows_follow_spans=True), tensors)
    expected = with_gradients(together(gpu.span_attention, own, tensors), tensors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_windows_that_follow_the_spans_of_queries() -> None:
    """Far keys with a high score would be seen in the softmax: no query sees a key beyond its own span."""
    case = in_time(
        Case(
            windows=((112, 112),),
            reaches=(112,),
            block=70,
            positions="shared",
            spans=(5.0, 60.5),
            dynamic=True,
        )
    )
    torch.manual_seed(0)
    tensors = tensors_of(case, torch.float32, DEVICE)
    with torch.no_grad():
        tensors["past0"][:, :90] *= 30
    found = with_gradients(together(gpu.span_attention, case, tensors, windows_follow_spans=True), tensors)
    exact, out = in_float64(tensors), []
    for t in range(case.block):  # every query alone, over its own window in steps of 16
        for b in range(case.batch):
            spans = exact["spans"][b, :, t].tolist()
            windows = [min(112, -(-(math.ceil(span) + case.ramp + 1) // 16) * 16) for span in spans]
            one = {
                "past0": torch.cat(
                    [exact["past0"], torch.cat([exact["k"], exact["v"]], 1).transpose(1, 2)], 1
                )
            }
            one["past0"] = one["past0"][b : b + 1, : 112 + t]
            one |= {name: exact[name][b : b + 1, :, t : t + 1] for name in ("q", "k", "v", "spans")}
            alone = replace(case, batch=1, block=1, reaches=(112 + t,))
            out.append(
                head_by_head(
                    eager.span_attention, alone, one | {"position_keys": exact["position_keys"]}, windows
                )
            )
    expected = torch.cat(out).view(case.block, case.batch, 2, -1).permute(1, 2, 0, 3)
    assert_near(found, with_gradients(expected, exact), TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "case",
    [
        Case(windows=((9, 20),), reaches=(20,), block=16, positions="per head", biases="both"),
        Case(windows=((9,), (40, 20)), reaches=(9, 40), positions="shared", spans=(4.0, 33.0, 10.5)),
    ],
    ids=["biased", "groups"],
)
def test_gradients_of_queries_lie_beside_those_of_keys_and_values(case: Case) -> None:
    """As they were projected: no copy joins them."""
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
@pytest.mark.parametrize("name", ["persistent vectors and spans", "biases, and groups of different reach"])
def test_half_precision_sums_in_float32(name: str) -> None:
    check(in_time(CASES[name]), torch.float16)


@needs_gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", LARGE_CASES.values(), ids=LARGE_CASES.keys())
def test_large_cases_on_cuda(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def mixed(x: np.ndarray) -> np.ndarray:
    """The hash of a query's row, of 32 bits: products that wrap around, shifted onto themselves."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def kept_BHTX(case: Case, seed: int, dropout: float, window: int) -> Tensor:
    """Which weights are kept: of the distances, nearest first, and then of the persistent vectors.

    A weight is dropped if the hash of its query's row (of all B x H x T) and its key's position, counted from
    the block's beginning, lies among the lowest. Persistent vectors begin at position 2^30.
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
        spans = tensors["spans"][:, head] if case.dynamic else tensors["spans"][head]
        mask = soft_mask(spans, case.ramp, window)
        weight_BTX = weight_BTX * torch.nn.functional.pad(mask, (0, case.num_persistent), value=1.0)
        if case.renormalise:
            weight_BTX = weight_BTX / (weight_BTX.sum(-1, keepdim=True) + EPSILON)
        kept_BTX = torch.cat([kept[:, head, :, :window], kept[:, head, :, longest:]], dim=-1)
        weight_BTX = weight_BTX * kept_BTX / (1 - dropout)
        near_BTK = torch.einsum("btw,btwk->btk", weight_BTX[..., :window], v_BTWK)
        persistent_BTK = (
            weight_BTX[..., window:] @ tensors["persistent_v"][head] if case.num_persistent else 0
        )
        out.append(near_BTK + persistent_BTK)
    return torch.stack(out, dim=1)


def check_dropout(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, dropout = 1234567, 0.3
    monkeypatch.setattr(
        gpu, "new_seed", lambda device: torch.tensor([seed], dtype=torch.int32, device=device)
    )
    tensors = tensors_of(case, dtype, DEVICE)
    exact = in_float64(tensors)
    kept = kept_BHTX(case, seed, dropout, max(case.flat_windows)).to(DEVICE)
    expected = with_gradients(dense(case, exact, kept, dropout), exact)
    found = with_gradients(together(gpu.span_attention, case, tensors, dropout=dropout), tensors)
    assert_near(found, expected, TOLERANCE[dtype])


@on_every_machine
@pytest.mark.parametrize(("renormalise", "dynamic"), [(True, False), (False, False), (True, True)])
def test_dropout_drops_what_its_hash_says_in_both_passes(
    renormalise: bool, dynamic: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        windows=((9,), (30, 40)),
        reaches=(9, 40),
        positions="shared",
        num_persistent=5,
        spans=(4.0, 20.5, 36.0),
        renormalise=renormalise,
        dynamic=dynamic,
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
