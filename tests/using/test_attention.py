"""`attention` of a loaded model: the weights that the layers really used, by distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import LoadedModel
from longspan.config import RunConfig
from longspan.data.tokenizers.character import CharacterTokenizer
from longspan.inspection.attention import LayerAttention
from longspan.layers import attention, sha_attention
from longspan.layers.recording import keep, recording
from tests.models.test_contract import SUPERNETS, VARIANTS, make

LETTERS = "abcdefghijk"
TEXT = "abcadefghijkaabbccddeeffgg"
ATTENDING = [name for name in VARIANTS if name not in ("sha-rnn, no attention",)]
OF_HEADS = [name for name in ATTENDING if not name.startswith("sha-rnn")]
OF_ONE_HEAD = [name for name in ATTENDING if name.startswith("sha-rnn")]


def loaded(variant: str, larger: float = 3.0) -> LoadedModel:
    model = make(variant)
    with torch.no_grad():  # so that what heads see matters
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(larger)
    return LoadedModel(model, CharacterTokenizer(LETTERS), RunConfig(), torch.device("cpu"), Path())


def attended(weights_TW: Tensor, values_SK: Tensor) -> Tensor:
    """The sum over distances, one query and one distance at a time."""
    rows = []
    for t in range(len(weights_TW)):
        row = torch.zeros_like(values_SK[0])
        for distance, weight in enumerate(weights_TW[t]):
            key = len(values_SK) - len(weights_TW) + t - distance
            if key >= 0:
                row = row + weight * values_SK[key]
        rows.append(row)
    return torch.stack(rows)


class Calls:
    """What `span_attention` was given and what it gave, call by call, with its heads in their own order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: list[list[Tensor]] = []
        self.pasts: list[list[Tensor]] = []
        self.persistent: list[Tensor | None] = []
        self.found: list[Tensor] = []
        self.order: list[list[int]] = []
        function = attention.span_attention

        def noting(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, *args: Any, **options: Any) -> Tensor:
            out_BHTK = function(q_BHTK, k_BHTK, v_BHTK, *args, **options)
            self.values.append(list(v_BHTK[0]))
            self.found.append(out_BHTK[0])
            return out_BHTK

        def keeping(layer: Any, q: Tensor, k: Tensor, order: list[int], given: Any) -> None:
            past = [value_MK for kv in given.past for value_MK in kv[0].transpose(0, 1).chunk(2)[1]]
            self.order.append(list(order))
            self.pasts.append(past)
            self.persistent.append(None if given.persistent is None else given.persistent[1])
            keep(layer, q, k, order, given)

        monkeypatch.setattr(attention, "span_attention", noting)
        monkeypatch.setattr(attention, "keep", keeping)


@pytest.mark.parametrize("variant", OF_HEADS)
def test_the_weights_are_those_of_the_layer(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times the values they give what the layer found: for every call, head and token."""
    lm = loaded(variant)
    state = lm.read("kjihgfedcba")
    calls = Calls(monkeypatch)
    layers = lm.attention(TEXT, state)
    assert layers
    done = dict.fromkeys(range(len(layers)), 0)
    for number, found_HTK in enumerate(calls.found):
        layer, block = number % len(layers), found_HTK.shape[1]  # layer after layer, maybe several times
        seen, start = layers[layer], done[layer]
        for place, head in enumerate(calls.order[number]):
            values_SK = torch.cat([calls.pasts[number][place], calls.values[number][place]])
            expected_TK = attended(seen.weights_HTW[head, start : start + block], values_SK)
            persistent = calls.persistent[number]
            if persistent is not None:
                assert seen.persistent_HTP is not None
                expected_TK = (
                    expected_TK + seen.persistent_HTP[head, start : start + block] @ persistent[place]
                )
            torch.testing.assert_close(found_HTK[place], expected_TK, rtol=1e-6, atol=1e-8)
        done[layer] += block
    assert set(done.values()) == {len(TEXT)}


@pytest.mark.parametrize("variant", OF_ONE_HEAD)
def test_the_weights_of_a_single_head(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = loaded(variant)
    state = lm.read("kjihgfedcba")
    function, calls = sha_attention._attend_by_torch, []

    def noting(q: Tensor, keys: list[Tensor], values: list[Tensor], *more: Any) -> Tensor:
        calls.append((torch.cat(list(values), dim=1)[0], function(q, keys, values, *more)[0]))
        return calls[-1][1]

    monkeypatch.setattr(sha_attention, "_attend_by_torch", noting)
    layers = lm.attention(TEXT, state)
    assert len(layers) == len(calls) > 0
    for seen, (values_SD, found_TD) in zip(layers, calls, strict=True):
        torch.testing.assert_close(attended(seen.weights_HTW[0], values_SD), found_TD, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("variant", [*ATTENDING, *SUPERNETS])
def test_weights_add_up(variant: str) -> None:
    """As fresh models are: where a head wants to look beyond its span the 1e-8 of the formula counts."""
    lm = loaded(variant, larger=1.0)
    for layer in lm.attention(TEXT):
        assert layer.weights_HTW.shape[1] == len(TEXT)
        assert (layer.weights_HTW >= 0).all()
        total_HT = layer.weights_HTW.sum(2)
        if layer.persistent_HTP is not None:
            total_HT = total_HT + layer.persistent_HTP.sum(2)
        if "not renormalised" in variant:
            assert (total_HT < 1).any()
        else:
            torch.testing.assert_close(total_HT, torch.ones_like(total_HT), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "variant", ["modern, keys and values", "adaptive-span", "transformer-xl, same length", "gpt"]
)
def test_a_text_that_was_cut(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, or after a state, every token looks where it looks in one piece."""
    lm = loaded(variant)
    assert lm.model.block_invariant
    whole = lm.attention(TEXT)
    rest = lm.attention(TEXT[9:], lm.read(TEXT[:9]))
    monkeypatch.setattr("longspan.reading.READ_BLOCK", 7)
    for one, other, end in zip(whole, lm.attention(TEXT), rest, strict=True):
        width = max(layer.weights_HTW.shape[2] for layer in (one, other, end))
        padded = [
            torch.nn.functional.pad(layer.weights_HTW, (0, width - layer.weights_HTW.shape[2]))
            for layer in (one, other, end)
        ]
        torch.testing.assert_close(padded[0], padded[1], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(padded[0][:, 9:], padded[2], rtol=1e-6, atol=1e-8)


def test_how_far_back_it_reaches() -> None:
    weights_HTW = torch.zeros(2, 4, 11)
    weights_HTW[0, :, 3] = 1.0  # always three back
    weights_HTW[1, :, :10] = 0.1  # evenly over ten
    layer = LayerAttention("mine", weights_HTW, None)
    assert layer.mean_distance_H.tolist() == pytest.approx([3.0, 4.5])
    assert layer.reach_H().tolist() == [3, 8]
    assert layer.reach_H(0.5).tolist() == [3, 4]


def test_heads_look_no_further_than_their_spans() -> None:
    lm = loaded("adaptive-span")
    spans = lm.spans()
    assert spans is not None
    for spans_H, layer in zip(spans, lm.attention(TEXT), strict=True):
        assert layer.weights_HTW[:, :, 0].abs().max() == 0  # a token does not see itself
        for span, weights_TW in zip(spans_H, layer.weights_HTW, strict=True):
            assert weights_TW[:, int(span) + 1 :].abs().sum() == 0


def test_layers_have_their_names_and_models_without_attention_none() -> None:
    assert [layer.name for layer in loaded("adaptive-span").attention("abc")] == ["blocks.0", "blocks.2"]
    assert loaded("sha-rnn, no attention").attention("abc") == []
    assert loaded("adaptive-span").attention("") == []


def test_nothing_is_kept_afterwards() -> None:
    lm = loaded("adaptive-span")
    with recording() as kept:
        lm.read("abc")
        assert len(kept) == 2
        with pytest.raises(RuntimeError, match="recorded already"), recording():
            pass
    lm.read("abc")
    assert len(kept) == 2
    assert all(len(calls) == 1 for calls in kept.values())


def test_weights_are_in_the_precision_of_the_model() -> None:
    lm = loaded("all-attention")
    lm.model.float()
    (first, *_) = lm.attention(TEXT)
    assert first.persistent_HTP is not None
    assert first.weights_HTW.dtype == first.persistent_HTP.dtype == torch.float32
