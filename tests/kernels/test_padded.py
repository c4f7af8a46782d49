"""The baseline of benchmarks/train_cpu.py against the loops."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import padded
from longspan.kernels.span_attention import AttentionContext, reference

from .grouped import with_keys
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
    expected = with_keys(reference.span_attention)(**named, **options, window=window)
    q, k, v = (named.pop(name) for name in ("q_BHTK", "k_BHSK", "v_BHSK"))
    found = padded.span_attention(q, k, v, AttentionContext(past=(), windows=[1, window], **named, **options))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    found_gradients = gradients(found, tensors)
    for name, gradient in gradients(expected, tensors).items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-9, atol=1e-10, msg=name)
