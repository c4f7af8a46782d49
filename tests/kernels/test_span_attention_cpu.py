"""Span attention in compiled code against the loops of reference.py: values, gradients, dropout, threads."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.home import home
from longspan.kernels import compiler
from longspan.kernels import span_attention as entry
from longspan.kernels.dispatch import forced
from longspan.kernels.span_attention import AttentionContext, cpu, reference, soft_mask
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

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

TOLERANCE = 5e-6
OF_A_SUM_THAT_CANCELS = 1e-4
CASES = {
    "one query": Case(windows=((5,),), reaches=(5,), block=1, batch=1, width=16),
    "shared positions and spans, more than a chunk": Case(
        windows=((9, 20), (40,)),
        reaches=(20, 40),
        block=37,
        width=16,
        positions="shared",
        spans=(4.0, 15.5, 33.0),
    ),
    "a span of nothing, one on the edge, one beyond the window": Case(
        windows=((7, 7, 7),), reaches=(3,), block=5, width=32, positions="shared", spans=(0.0, 2.0, 30.0)
    ),
    "no memory": Case(windows=((4, 17),), reaches=(0,), block=18, width=48, positions="shared"),
    "more memory than any head sees": Case(windows=((4,), (16,)), reaches=(30, 30), block=3, width=16),
    "unfilled memory": Case(
        windows=((12, 12),),
        reaches=(12,),
        block=6,
        width=16,
        spans=(3.0, 9.5),
        first_distance=0,
        filled=(0, 7),
    ),
    "spans of every query": Case(
        windows=((40, 9), (64,)),
        reaches=(40, 64),
        block=70,
        width=16,
        positions="shared",
        spans=(33.0, 4.0, 60.5),
        dynamic=True,
    ),
    "spans of every query, unfilled": Case(
        windows=((21, 21),),
        reaches=(21,),
        block=35,
        width=32,
        spans=(16.0, 9.75),
        dynamic=True,
        first_distance=0,
        filled=(0, 7),
    ),
    "a position that sees itself": Case(
        windows=((33,),), reaches=(40,), block=34, width=16, positions="shared", first_distance=0, batch=1
    ),
}


def as_it_should_be(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without spans heads of a group look equally far."""
    exact, windows = in_float64(tensors), case.flat_windows
    if case.spans is None:
        windows = [max(group) for group in case.windows for _ in group]
    return with_gradients(head_by_head(reference.span_attention, case, exact, windows), exact)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_compiled_code_equals_the_loops(case):
    tensors = tensors_of(case, torch.float32)
    found = with_gradients(together(cpu.span_attention, case, tensors), tensors)
    assert_near(found, as_it_should_be(case, tensors), TOLERANCE)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(1, 24), min_size=1, max_size=2), min_size=1, max_size=2),
    block=st.integers(1, 36),
    batch=st.integers(1, 2),
    reach=st.integers(0, 30),
    width=st.sampled_from([16, 32, 80]),
    positions=st.sampled_from(["none", "shared"]),
    first=st.integers(0, 1),
    learned=st.booleans(),
    dynamic=st.booleans(),
    data=st.data(),
)
def test_any_shape_equals_the_loops(
    groups, block, batch, reach, width, positions, first, learned, dynamic, data
):
    heads = sum(map(len, groups))
    spans = (
        data.draw(
            st.lists(st.integers(0, 192).map(lambda eighths: eighths / 8), min_size=heads, max_size=heads)
        )
        if learned
        else None
    )
    unfilled = first == 0 and data.draw(st.booleans())
    filled = data.draw(st.lists(st.integers(0, reach), min_size=batch, max_size=batch)) if unfilled else None
    case = Case(
        windows=tuple(map(tuple, groups)),
        reaches=(reach,) * len(groups),
        block=block,
        batch=batch,
        width=width,
        positions=positions,
        spans=None if spans is None else tuple(spans),
        dynamic=dynamic,
        first_distance=first,
        filled=None if filled is None else tuple(filled),
    )
    tensors = tensors_of(case, torch.float32)
    found = with_gradients(together(cpu.span_attention, case, tensors), tensors)
    assert_near(found, as_it_should_be(case, tensors), OF_A_SUM_THAT_CANCELS)


@pytest.fixture
def _narrow_vectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    compiler.compiled.cache_clear()
    monkeypatch.setenv("CXXFLAGS", "-mno-avx512f")
    yield
    monkeypatch.undo()
    compiler.compiled.cache_clear()


@pytest.mark.usefixtures("_narrow_vectors")
def test_a_cpu_with_narrower_vectors_computes_the_same():
    if compiler.compiled(cpu.SOURCE) is None:
        pytest.skip("this CPU has no wide vectors that could be disabled")
    for case in CASES.values():
        tensors = tensors_of(case, torch.float32)
        found = with_gradients(together(cpu.span_attention, case, tensors), tensors)
        assert_near(found, as_it_should_be(case, tensors), TOLERANCE)


def test_the_entry_point_takes_it_and_a_shorter_window_is_enough_for_a_span():
    case = CASES["shared positions and spans, more than a chunk"]
    tensors = tensors_of(case, torch.float32)
    found = with_gradients(together(entry.span_attention, case, tensors), tensors)
    alone = with_gradients(together(cpu.span_attention, case, tensors), tensors)
    with forced("eager"):
        grouped = with_gradients(together(entry.span_attention, case, tensors), tensors)
    assert all(torch.equal(found[name], alone[name]) for name in found)
    assert not torch.equal(found["out"], grouped["out"])
    assert_near(found, grouped, TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [
        Case(windows=((6,),), reaches=(6,), block=16, width=16, num_persistent=2),
        Case(windows=((6,),), reaches=(6,), block=16, width=16, positions="per head"),
        Case(windows=((6,),), reaches=(6,), block=16, width=16, positions="shared", biases="both"),
        Case(windows=((6,),), reaches=(6,), block=16, width=16, spans=(2.0,), renormalise=False),
        Case(windows=((6,),), reaches=(6,), block=16, width=8),
        Case(windows=((6,),), reaches=(6,), block=15, width=16),
    ],
    ids=[
        "persistent",
        "positions of every head",
        "biases",
        "not renormalised",
        "half a vector",
        "a short block",
    ],
)
def test_what_it_does_not_know_is_left_to_plain_torch(case):
    tensors = tensors_of(case, torch.float32)
    found = with_gradients(together(entry.span_attention, case, tensors), tensors)
    with forced("eager"):
        expected = with_gradients(together(entry.span_attention, case, tensors), tensors)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["k", "v", "past0"])
def test_other_numbers_are_left_to_plain_torch(name):
    tensors = tensors_of(CASES["no memory"], torch.float32)
    assert together(cpu.supports, CASES["no memory"], tensors)
    others = tensors | {name: tensors[name].bfloat16()}
    assert not together(cpu.supports, CASES["no memory"], others)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"k": (2, 2, 17, 48)}, "keys"),
        ({"v": (2, 2, 18, 32)}, "values"),
        ({"past0": (1, 5, 4, 48)}, "past"),
        ({"past0": (2, 5, 2, 48)}, "past"),
        ({"position_keys": (16, 48)}, "position_keys"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_read(wrong, named):
    case = CASES["no memory"]
    tensors = tensors_of(case, torch.float32)
    with pytest.raises(ValueError, match=named):
        together(
            cpu.span_attention, case, tensors | {name: torch.zeros(shape) for name, shape in wrong.items()}
        )


def test_a_memory_that_is_not_filled_needs_queries_that_see_themselves():
    case = replace(CASES["unfilled memory"], first_distance=1)
    with pytest.raises(ValueError, match="first_distance must be 0"):
        together(cpu.span_attention, case, tensors_of(case, torch.float32))


def kept_places(batch: int, heads: int, block: int, window: int, dropout: float, seed: int) -> Tensor:
    """The hash of kernels/hashing.py in whole numbers, [B, H, T, W], nearest first."""
    row = torch.arange(batch * heads * block).view(batch, heads, block, 1) ^ seed
    row = (row ^ row >> 16) * 0x7FEB352D & 0xFFFFFFFF
    row = (row ^ row >> 15) * 0x846CA68B & 0xFFFFFFFF
    row = row ^ row >> 16
    x = (row ^ torch.arange(window)) * 0x7FEB352D & 0xFFFFFFFF
    return ((x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF) >= int(dropout * 2**32)


def test_dropout_replayed():
    """Every weight that the hash keeps is used 1 / (1 - p) times, the others are not, in both passes."""
    case = Case(windows=((20, 20),), reaches=(20,), block=35, width=16, spans=(5.0, 12.25))
    tensors, dropout = tensors_of(case, torch.float32), 0.25
    torch.manual_seed(3)
    found = with_gradients(together(cpu.span_attention, case, tensors, dropout=dropout), tensors)
    torch.manual_seed(3)
    seed = int(torch.randint(2**31, (1,)))
    kept = kept_places(case.batch, 2, case.block, 20, dropout, seed) / (1 - dropout)

    exact = in_float64(tensors)
    mask_HW = soft_mask(exact["spans"], case.ramp, 20)
    out = []
    for head, (k_BSK, v_BSK) in enumerate(keys_and_values(case, exact)):
        near_k, near_v = (
            x.unfold(1, 20, 1)[:, : case.block].flip(-1) for x in (k_BSK, v_BSK)
        )  # [B, T, K, W]
        a_BTW = torch.einsum("btk,btkw->btw", exact["q"][:, head], near_k).div(4).softmax(-1) * mask_HW[head]
        w_BTW = a_BTW / (a_BTW.sum(-1, keepdim=True) + EPSILON) * kept[:, head]
        out.append(torch.einsum("btw,btkw->btk", w_BTW, near_v))
    assert_near(found, with_gradients(torch.stack(out, dim=1), exact), TOLERANCE)


def test_dropout_keeps_its_share():
    """Values of one: an output is the sum of the weights that were kept, its mean over all queries 1."""
    dropout, window = 0.3, 64
    q, k = torch.randn(2, 4, 4, 512, 16).mul(0.1)
    ones = torch.ones(4, 4, 512, 16)
    past = [torch.cat([torch.zeros(4, window, 4, 16), torch.ones(4, window, 4, 16)], dim=2)]
    context = AttentionContext(past=past, windows=[window] * 4, dropout=dropout)
    out = cpu.span_attention(q, k, ones, context)
    sums = out[..., 0].double()
    deviation = (dropout / (1 - dropout) / window) ** 0.5  # of one query, its weights being nearly alike
    assert abs(sums.mean() - 1) < 4 * deviation / sums.numel() ** 0.5
    assert abs(sums.std() / deviation - 1) < 0.05


@pytest.mark.slow
def test_windows_are_cut_to_the_longest_span_of_a_query():
    case = Case(
        windows=((300, 300),), reaches=(300,), block=40, width=16, spans=(20.0, 33.5), dynamic=True, ramp=3
    )
    tensors = tensors_of(case, torch.float32)
    tensors["q"].data.mul_(0.3)  # so that no score outside the span matters next to the 1e-8
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_columns", lambda window: sizes.append(window) or -(-window // 16) * 16)
        found = with_gradients(
            together(cpu.span_attention, case, tensors, windows_follow_spans=True), tensors
        )
    assert set(sizes) == {24, 38}  # one beyond the soft edge
    assert_near(found, as_it_should_be(case, tensors), TOLERANCE)


def test_threads_do_not_change_a_bit():
    case = CASES["shared positions and spans, more than a chunk"]
    tensors, results = tensors_of(case, torch.float32), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            results.append(with_gradients(together(cpu.span_attention, case, tensors, dropout=0.2), tensors))
    finally:
        torch.set_num_threads(1)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_nothing_is_kept_for_gradients_that_nobody_wants():
    case = CASES["no memory"]
    tensors = tensors_of(case, torch.float32)
    expected = together(cpu.span_attention, case, tensors)
    with torch.no_grad():
        found = together(cpu.span_attention, case, tensors)
    assert expected.grad_fn is not None
    assert found.grad_fn is None
    assert torch.equal(found, expected)


def test_what_is_no_number_stays_none():
    case = CASES["no memory"]
    tensors = tensors_of(case, torch.float32)
    with torch.no_grad():
        tensors["q"][0, 1, 7, 3] = torch.nan
        out = together(cpu.span_attention, case, tensors)
    assert out[0, 1, 7].isnan().all()
    assert out.isnan().sum() == case.width


def test_without_any_score_there_is_no_number():
    case = CASES["no memory"]
    tensors = tensors_of(case, torch.float32)
    with torch.no_grad():
        tensors["position_keys"].fill_(-torch.inf)
        tensors["q"].abs_()
        assert together(cpu.span_attention, case, tensors).isnan().all()


def test_scores_of_any_size():
    """The softmax of scores far apart is all on one key, without overflow."""
    q, k, v = torch.randn(3, 1, 1, 9, 16).unbind(0)
    past = [torch.randn(1, 9, 2, 16)]
    context = AttentionContext(past=past, windows=[9], first_distance=0)
    out = cpu.span_attention(1e4 * q, k, v, context)
    all_k = torch.cat([past[0][:, :, 0], k[:, 0]], dim=1)[0]
    all_v = torch.cat([past[0][:, :, 1], v[:, 0]], dim=1)[0]
    for t in range(9):
        best = (all_k[t + 1 : t + 10] @ q[0, 0, t]).argmax()
        torch.testing.assert_close(out[0, 0, t], all_v[t + 1 + best])


def library(monkeypatch: pytest.MonkeyPatch, **variables: str) -> ctypes.CDLL | None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return compiler.compiled.__wrapped__(cpu.SOURCE)


def test_compiled_once(monkeypatch):
    folder = home() / "compiled"
    assert library(monkeypatch) is not None
    (made,) = folder.iterdir()
    stamp = made.stat().st_mtime_ns
    assert library(monkeypatch) is not None
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == [stamp]
    assert library(monkeypatch, CXXFLAGS="-O1") is not None  # which makes another
    assert len(list(folder.iterdir())) == 2


def test_asking_for_a_compiler_compiles_nothing(monkeypatch):
    assert cpu.can_compile()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not cpu.can_compile()
    monkeypatch.setenv("CXX", "'not closed")
    assert not cpu.can_compile()
    assert not list(home().rglob("*.so"))


def test_without_a_compiler_there_is_nothing(monkeypatch):
    assert library(monkeypatch, CXX="no-such-compiler") is None
    assert not list(home().rglob("*.so"))


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CXX", "false", "exit status 1"),
        ("CXXFLAGS", "-no-such-option", "no-such-option"),
        ("CXXFLAGS", "'not closed", "No closing quotation"),
        ("CXXFLAGS", "-ffast-math", "fast math"),
        ("CXXFLAGS", "-mno-avx2", "without AVX2"),
        ("LONGSPAN_HOME", "/dev/null", "Not a directory"),
    ],
)
def test_a_compiler_that_fails_is_a_warning(monkeypatch, variable, value, reason):
    with pytest.warns(UserWarning, match=f"plain torch takes longer: .*{reason}"):
        assert library(monkeypatch, **{variable: value}) is None
    assert not list(home().rglob("*.so"))


def test_a_compiler_with_arguments(monkeypatch):
    assert library(monkeypatch, CXX="c++ -DANYTHING") is not None


def test_a_damaged_library_is_made_anew(monkeypatch, tmp_path):
    assert library(monkeypatch) is not None
    (made,) = (home() / "compiled").iterdir()
    other = tmp_path / "other home" / "compiled" / made.name  # a library that is loaded is not read again
    other.parent.mkdir(parents=True)
    other.write_bytes(made.read_bytes()[:100])
    assert library(monkeypatch, LONGSPAN_HOME=str(other.parents[1])) is not None
    assert other.stat().st_size > 1000


def test_without_compiled_code_plain_torch_is_used(monkeypatch):
    monkeypatch.setattr(cpu, "compiled", lambda source: None)
    case = CASES["no memory"]
    tensors = tensors_of(case, torch.float32)
    found = together(entry.span_attention, case, tensors)
    with forced("eager"):
        assert torch.equal(found, together(entry.span_attention, case, tensors))


def test_the_source_is_part_of_the_package():
    assert cpu.SOURCE.is_file()
    declared = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert "kernels/span_attention/*.cpp" in declared
