"""Span attention in plain torch against the loops of reference.py: values and gradients, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.kernels import span_attention as entry
from longspan.kernels.span_attention import eager, head_groups, reference, soft_mask
from longspan.kernels.span_attention.context import EPSILON

from .grouped import with_keys

span_attention, loops = with_keys(eager.span_attention), with_keys(reference.span_attention)

BIASES = st.sampled_from([(), ("content",), ("position",), ("content", "position")])


def inputs(
    batch: int,
    heads: int,
    block: int,
    memory: int,
    width: int,
    limit: int,
    spans: list[float] | None,
    num_persistent: int = 0,
    positions: str = "shared",
    biases: tuple[str, ...] = (),
    dynamic: bool = False,
) -> dict[str, Tensor]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    made = {
        "q_BHTK": leaf(batch, heads, block, width),
        "k_BHSK": leaf(batch, heads, memory + block, width),
        "v_BHSK": leaf(batch, heads, memory + block, width),
        "position_keys": leaf(limit, width),
    }
    if positions == "per head":
        made["position_keys"] = leaf(heads, limit, width)
    if positions == "mapped":
        made["position_keys"] = leaf(limit, width + 1)
        made["position_map_HKE"] = leaf(heads, width, width + 1)
    made |= {f"{kind}_bias_HK": leaf(heads, width) for kind in biases}
    if num_persistent:
        made |= {
            "persistent_k": leaf(heads, num_persistent, width),
            "persistent_v": leaf(heads, num_persistent, width),
        }
    if spans is not None:
        made["spans"] = torch.tensor(spans, dtype=torch.float64)
        if dynamic:  # a part of its head's span for every query, from none to all in quarters
            made["spans"] = made["spans"][:, None] * torch.randint(5, (batch, heads, block)) / 4
        made["spans"].requires_grad_()
    return made


def arguments(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Keys and values of persistent vectors go in as a pair."""
    named: dict[str, Any] = {
        name: tensor for name, tensor in tensors.items() if not name.startswith("persistent")
    }
    if "persistent_k" in tensors:
        named["persistent"] = tensors["persistent_k"], tensors["persistent_v"]
    return named


def gradients(out: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    found = torch.autograd.grad((out * weight).sum(), list(tensors.values()), allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if grad is None else grad
        for (name, tensor), grad in zip(tensors.items(), found, strict=True)
    }


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    block=st.integers(1, 7),
    memory=st.integers(0, 9),
    window=st.integers(1, 9),
    ramp=st.integers(1, 4),
    first=st.integers(0, 1),
    learned=st.booleans(),
    dynamic=st.booleans(),
    renormalise=st.booleans(),
    num_persistent=st.integers(0, 3),
    whole=st.booleans(),
    chunk=st.integers(1, 4),
    data=st.data(),
)
def test_eager_path_equals_the_loops(
    batch,
    heads,
    block,
    memory,
    window,
    ramp,
    first,
    learned,
    dynamic,
    renormalise,
    num_persistent,
    whole,
    chunk,
    data,
):
    # Whole spans put positions exactly on the edges of the clamp, where the gradient must still pass.
    span = st.integers(0, window).map(float) if whole else st.floats(0, window)
    spans = data.draw(st.lists(span, min_size=heads, max_size=heads)) if learned else None
    tensors = inputs(batch, heads, block, memory, 2, window, spans, num_persistent, dynamic=dynamic)
    options = {"window": window, "ramp": ramp, "renormalise": renormalise, "first_distance": first}
    expected = loops(**arguments(tensors), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "CHUNK", chunk)
        found = span_attention(**arguments(tensors), **options)
        found_gradients = gradients(found, tensors)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients(expected, tensors).items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-9, atol=1e-10, msg=name)


@settings(max_examples=40, deadline=None)
@given(
    block=st.integers(1, 7),
    memory=st.integers(0, 6),
    window=st.integers(1, 12),
    learned=st.booleans(),
    dynamic=st.booleans(),
    renormalise=st.booleans(),
    num_persistent=st.integers(0, 2),
    positions=st.sampled_from(["shared", "per head", "mapped"]),
    biases=BIASES,
    chunk=st.integers(1, 4),
    data=st.data(),
)
def test_memory_that_is_not_yet_filled_and_positions_of_each_head(
    block, memory, window, learned, dynamic, renormalise, num_persistent, positions, biases, chunk, data
):
    heads = 2
    filled = data.draw(st.lists(st.integers(0, memory), min_size=2, max_size=2))
    spans = data.draw(st.lists(st.floats(0, window), min_size=2, max_size=2)) if learned else None
    tensors = inputs(2, heads, block, memory, 2, window, spans, num_persistent, positions, biases, dynamic)
    options = {"window": window, "ramp": 2, "renormalise": renormalise}
    options |= {"first_distance": 0, "filled_B": torch.tensor(filled)}
    expected = loops(**arguments(tensors), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "CHUNK", chunk)
        found = span_attention(**arguments(tensors), **options)
        found_gradients = gradients(found, tensors)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients(expected, tensors).items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-9, atol=1e-10, msg=name)


def test_what_is_not_filled_does_not_count():
    tensors = inputs(1, 1, 2, 3, 2, 5, None)
    del tensors["position_keys"]
    whole = span_attention(**tensors, window=5, first_distance=0, filled_B=torch.tensor([1]))
    cut = {name: tensor[:, :, 2:] if name != "q_BHTK" else tensor for name, tensor in tensors.items()}
    torch.testing.assert_close(
        whole, span_attention(**cut, window=5, first_distance=0, filled_B=torch.tensor([1]))
    )
    with pytest.raises(ValueError, match="first_distance"):
        span_attention(**tensors, window=5, first_distance=1, filled_B=torch.tensor([1]))


def test_without_positions():
    tensors = inputs(2, 2, 5, 4, 3, 6, [2.5, 0.0])
    del tensors["position_keys"]
    options = {"window": 6, "ramp": 2}
    expected = loops(**tensors, **options)
    found = span_attention(**tensors, **options)
    torch.testing.assert_close(found, expected)
    found_gradients = gradients(found, tensors)
    for name, gradient in gradients(expected, tensors).items():
        torch.testing.assert_close(found_gradients[name], gradient, msg=name)


def test_a_bias_of_the_content_learns_nothing_from_positions():
    """Not even where it is all that learns."""
    tensors = inputs(2, 2, 5, 4, 3, 6, [2.5, 0.0], biases=("content",))
    options = {"window": 6, "ramp": 2}
    bias = {"content_bias_HK": tensors["content_bias_HK"]}
    fixed = {name: tensor.detach() for name, tensor in tensors.items()} | bias
    expected = gradients(loops(**tensors, **options), bias)
    found = gradients(span_attention(**fixed, **options), bias)
    torch.testing.assert_close(found, expected)


def test_a_longer_window_changes_nothing_beyond_the_span():
    tensors = inputs(1, 2, 6, 20, 4, 20, [3.0, 5.5])
    short = span_attention(**tensors, window=9, ramp=3)
    long = span_attention(**tensors, window=20, ramp=3)
    torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-6)


def test_tiny_mass_inside_the_span_shows_the_epsilon():
    """The softmax runs over the whole window, so what lies outside the span still takes its share."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    keys = torch.tensor([18.0, 0.0, 0.0], dtype=torch.float64).view(1, 1, 3, 1)
    values = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64).view(1, 1, 3, 1)
    out = span_attention(q, keys, values, window=2, spans=torch.zeros(1, dtype=torch.float64), ramp=1)
    mass = 1 / (1 + torch.e**18)
    assert out.item() == pytest.approx(mass / (mass + EPSILON), rel=1e-9)


def test_not_renormalised_the_mask_takes_weight_away():
    """Two distances and a persistent vector of one score: of three thirds the mask leaves one and a half."""
    ones = torch.ones(1, 1, 3, 1, dtype=torch.float64)
    persistent = torch.zeros(1, 1, 1, dtype=torch.float64), torch.full((1, 1, 1), 10.0, dtype=torch.float64)
    span = torch.tensor([0.0], dtype=torch.float64)
    given = {"window": 2, "ramp": 2, "spans": span, "persistent": persistent}
    bare = span_attention(ones[:, :, :1] * 0, ones, ones, renormalise=False, **given)
    assert bare.item() == pytest.approx((1 + 0.5 + 10) / 3)
    whole = span_attention(ones[:, :, :1] * 0, ones, ones, **given)
    assert whole.item() == pytest.approx((1 + 0.5 + 10) / 2.5)


def test_dropout_drops_weights_and_keeps_the_mean():
    tensors = inputs(1, 1, 1, 400, 4, 400, None)
    ones = torch.ones_like(tensors["v_BHSK"])
    outs = [
        span_attention(
            tensors["q_BHTK"] * 0, tensors["k_BHSK"], ones, window=400, dropout=0.25, ramp=1
        ).mean()
        for _ in range(50)
    ]
    mean = torch.stack(outs).mean().item()
    assert mean == pytest.approx(1.0, abs=0.03)
    assert torch.stack(outs).std() > 0.01


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("renormalise", [True, False])
def test_dropout_has_the_gradient_of_what_it_kept(renormalise, dynamic, monkeypatch):
    monkeypatch.setattr(eager, "CHUNK", 2)  # each chunk drops others
    tensors = inputs(2, 2, 5, 3, 3, 4, [1.3, 2.7], num_persistent=2)
    if dynamic:
        tensors["spans"] = torch.tensor([1.3, 2.7], dtype=torch.float64)[:, None].sub(
            torch.rand(2, 2, 5).mul(0.25)
        )
        tensors["spans"].requires_grad_()

    def run(*leaves: Tensor) -> Tensor:
        torch.manual_seed(7)
        named = dict(zip(tensors, leaves, strict=True))
        return span_attention(**arguments(named), window=4, ramp=2, dropout=0.5, renormalise=renormalise)

    assert torch.autograd.gradcheck(run, tuple(tensors.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_persistent", [0, 3])
def test_half_precision_stays_close_to_float32(dtype, num_persistent):
    made = inputs(1, 2, 9, 5, 8, 12, [4.0, 7.5], num_persistent)
    exact = {name: t.detach().float().requires_grad_() for name, t in made.items()}
    half = {
        name: t.detach().to(dtype if name in ("q_BHTK", "k_BHSK", "v_BHSK") else t.dtype).requires_grad_()
        for name, t in exact.items()
    }
    options = {"window": 12, "ramp": 4}
    expected = span_attention(**arguments(exact), **options)
    found = span_attention(**arguments(half), **options)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.03)
    expected_gradients = gradients(expected, exact)
    for name, gradient in gradients(found, half).items():
        torch.testing.assert_close(gradient.float(), expected_gradients[name], rtol=0.1, atol=0.06, msg=name)


def test_chunks_add_up_in_full_precision(monkeypatch):
    """One query after another, in half precision, comes to what few chunks come to."""
    made = inputs(1, 1, 256, 0, 8, 64, None, num_persistent=2)
    half = {name: t.detach().to(torch.bfloat16).requires_grad_() for name, t in made.items()}
    few = gradients(span_attention(**arguments(half), window=64), half)
    monkeypatch.setattr(eager, "CHUNK", 1)
    for name, gradient in gradients(span_attention(**arguments(half), window=64), half).items():
        assert (gradient - few[name]).norm() < 0.02 * few[name].norm(), name


def test_soft_mask_by_hand():
    mask = soft_mask(torch.tensor([0.0, 2.0, 2.5]), ramp=4, window=7)
    expected = [
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0],
        [1.0, 1.0, 1.0, 0.875, 0.625, 0.375, 0.125],
    ]
    torch.testing.assert_close(mask, torch.tensor(expected))


@given(st.lists(st.integers(1, 8192), min_size=1, max_size=12))
def test_head_groups_hold_every_head_once_and_nobody_pays_double(windows):
    groups = head_groups(windows)
    assert sorted(head for heads in groups for head in heads) == list(range(len(windows)))
    for heads in groups:
        reach = [windows[head] for head in heads]
        assert max(reach) <= max(2 * min(reach), entry.SHORT)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 3)), min_size=1, max_size=12))
def test_heads_of_different_kinds_never_go_together(heads):
    windows, kinds = zip(*heads, strict=True)
    groups = head_groups(windows, kinds_H=kinds)
    assert sorted(head for group in groups for head in group) == list(range(len(heads)))
    assert all(len({kinds[head] for head in group}) == 1 for group in groups)
    assert len(groups) <= len(set(kinds)) * len(head_groups(windows))
