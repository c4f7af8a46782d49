"""The entry point of span attention, where plain torch computes group by group."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from longspan.kernels import span_attention as entry
from longspan.kernels.dispatch import forced
from longspan.kernels.span_attention import cpu, eager, reference

from .grouped import Case, assert_near, head_by_head, tensors_of, together, with_gradients

CASES = {
    "one group": Case(windows=((4, 6),), reaches=(5,), block=3, width=2),
    "shared positions and spans": Case(
        windows=((3, 5), (9,)),
        reaches=(5, 9),
        block=4,
        width=2,
        positions="shared",
        spans=(0.0, 1.5, 6.0),
        ramp=2,
    ),
    "positions of each head, unfilled memory, persistent vectors": Case(
        windows=((2,), (5, 7)),
        reaches=(2, 7),
        block=3,
        width=2,
        positions="per head",
        biases="both",
        num_persistent=2,
        first_distance=0,
        filled=(0, 2),
    ),
    "positions mapped": Case(
        windows=((5,), (9,)), reaches=(5, 9), block=3, width=2, positions="mapped", biases="position"
    ),
    "a bias of the content": Case(
        windows=((4, 6),), reaches=(0,), block=4, width=2, biases="content", first_distance=0, filled=(0, 0)
    ),
    "a whole text": Case(
        windows=((4, 6), (300,)), reaches=(0, 0), block=4, width=2, first_distance=0, filled=(0, 0)
    ),
    "a whole text, longer than a window": Case(
        windows=((4, 3),), reaches=(0,), block=4, width=2, first_distance=0, filled=(0, 0)
    ),
    "a block after zeros": Case(windows=((4, 6),), reaches=(0,), block=4, width=2, first_distance=0),
    "not renormalised": Case(
        windows=((4,), (8,)),
        reaches=(0, 3),
        block=3,
        width=2,
        num_persistent=1,
        spans=(1.0, 7.5),
        renormalise=False,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_head_is_as_the_loops_say(case: Case) -> None:
    """In plain torch a head is given the longest window of its group."""
    tensors = tensors_of(case)
    given = [max(windows) for windows in case.windows for _ in windows]
    expected = with_gradients(head_by_head(reference.span_attention, case, tensors, given), tensors)
    assert_near(with_gradients(together(entry.span_attention, case, tensors), tensors), expected, 1e-9)


def test_a_window_longer_than_its_own_gives_a_head_nothing_but_a_share_of_the_epsilon() -> None:
    case = CASES["shared positions and spans"]
    tensors = tensors_of(case)
    expected = with_gradients(
        head_by_head(reference.span_attention, case, tensors, case.flat_windows), tensors
    )
    assert_near(with_gradients(together(entry.span_attention, case, tensors), tensors), expected, 1e-5)


@pytest.mark.parametrize(("name", "own"), [("a whole text", True), ("a block after zeros", False)])
def test_torch_itself_attends_to_whole_texts(name: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: called.append(1) or plain(*a, **k))
    case = CASES[name]
    tensors = tensors_of(case)
    found = together(entry.span_attention, case, tensors)
    assert bool(called) == own
    with forced("eager"):
        torch.testing.assert_close(together(entry.span_attention, case, tensors), found)
    assert len(called) == own


def test_a_path_is_forced_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for backend in (eager, cpu):
        monkeypatch.setattr(backend, "span_attention", lambda q, *_, b=backend: calls.append(b) or q)
    monkeypatch.setattr(cpu, "supports", lambda *_: True)
    case = CASES["one group"]
    tensors = tensors_of(case)
    together(entry.span_attention, case, tensors)
    with forced("eager"):
        together(entry.span_attention, case, tensors)
        with forced(None):
            together(entry.span_attention, case, tensors)
    together(entry.span_attention, case, tensors)
    assert calls == [cpu, eager, cpu, cpu]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "plain"), [(torch.float32, False), (torch.float64, True)])
def test_on_a_gpu_only_float64_goes_through_plain_torch(
    dtype: torch.dtype, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    whole = eager.span_attention
    monkeypatch.setattr(eager, "span_attention", lambda *a, **k: called.append(1) or whole(*a, **k))
    case = CASES["one group"]
    together(entry.span_attention, case, tensors_of(case, dtype, "cuda"))
    assert bool(called) == plain
