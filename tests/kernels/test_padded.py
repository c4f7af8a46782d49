"""The original's way against the loops, and the switch that holds the door to a path."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.config import AdaptiveSpanConfig, SpanConfig
from longspan.kernels.dispatch import forced
from longspan.kernels.span_attention import eager, head_groups, padded, reference, span_attention
from longspan.models import build

from .test_span_attention import BIASES, arguments, gradients, inputs


@settings(max_examples=40, deadline=None)
@given(
    block=st.integers(1, 6),
    memory=st.integers(0, 9),
    window=st.integers(1, 9),
    first=st.integers(0, 1),
    learned=st.booleans(),
    renormalise=st.booleans(),
    num_persistent=st.integers(0, 2),
    positions=st.sampled_from(["shared", "per head", "mapped"]),
    biases=BIASES,
    some_filled=st.booleans(),
    data=st.data(),
)
def test_it_equals_the_loops(
    block, memory, window, first, learned, renormalise, num_persistent, positions, biases, some_filled, data
):
    spans = data.draw(st.lists(st.floats(0, window), min_size=2, max_size=2)) if learned else None
    tensors = inputs(2, 2, block, memory, 2, window, spans, num_persistent, positions, biases)
    options = {"ramp": 2, "renormalise": renormalise, "first_distance": first}
    rows = data.draw(st.lists(st.integers(0, memory), min_size=2, max_size=2))
    if some_filled and first == 0:
        options["filled_B"] = torch.tensor(rows)
    named = arguments(tensors)
    expected = reference.span_attention(**named, **options, window=window)
    k, v = named.pop("k_BHSK"), named.pop("v_BHSK")
    past = torch.cat([x[:, :, :memory].transpose(1, 2) for x in (k, v)], dim=2)
    with forced("padded"):
        found = span_attention(
            k_BHTK=k[:, :, memory:],
            v_BHTK=v[:, :, memory:],
            past=[past],
            windows=[1, window],
            **named,
            **options,
        )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    found_gradients = gradients(found, tensors)
    for name, gradient in gradients(expected, tensors).items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-9, atol=1e-10, msg=name)


def test_the_door_is_held_to_a_path_and_let_go(monkeypatch):
    config = AdaptiveSpanConfig(
        num_layers=1, width=16, num_heads=2, inner_width=32, span=SpanConfig(limit=16, ramp=4)
    )
    model, tokens, taken = build(config, 11).eval(), torch.zeros(1, 4, dtype=torch.long), []
    for path in (eager, padded):
        monkeypatch.setattr(path, "span_attention", lambda q, *_, path=path, **__: taken.append(path) or q)
    model(tokens, model.initial_state(1))
    with forced("padded"):
        model(tokens, model.initial_state(1))
        with forced("eager"):
            model(tokens, model.initial_state(1))
        with forced(None):
            model(tokens, model.initial_state(1))
    model(tokens, model.initial_state(1))
    assert taken == [eager, padded, eager, eager, eager]


def test_windows_without_spans_stay_what_they_are():
    span = SpanConfig(kind="fixed", limit=9, windows=((2, 9),))
    config = AdaptiveSpanConfig(num_layers=1, width=16, num_heads=2, inner_width=32, span=span)
    model, tokens = build(config, 11).double().eval(), torch.randint(11, (2, 20))
    expected, _ = model(tokens, model.initial_state(2))
    with forced("padded"):
        found, _ = model(tokens, model.initial_state(2))
    torch.testing.assert_close(found, expected)


def test_padded_heads_are_one_group():
    windows = [1, 5000, 200]
    assert len(head_groups(windows)) == 3
    with forced("padded"):
        assert head_groups(windows) == [[0, 1, 2]]
    assert len(head_groups(windows)) == 3
