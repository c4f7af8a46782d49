"""FLOPs per token against torch's own counter and against counts by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longspan.config import (
    AdaptiveSpanConfig,
    AllAttentionConfig,
    GptConfig,
    ModelConfig,
    ModernConfig,
    RunConfig,
    SearchConfig,
    ShaRnnConfig,
    SpanConfig,
    TrainingConfig,
    TransformerXLConfig,
    VocabularyConfig,
)
from longspan.config.transformer_xl import XLVocabularyConfig
from longspan.flops import Shape, flops
from longspan.models import Supernet, build, build_run
from longspan.output import OutputHead

V, D, H, K, T, B = 13, 12, 3, 4, 5, 2
SHAPE = Shape(B, T)
FIXED = SpanConfig(kind="fixed", limit=8)
XL = TransformerXLConfig(num_layers=1, width=D, num_heads=H, inner_width=20, memory_length=6)


def counted(module: torch.nn.Module, *inputs: object) -> float:
    """With gradients so small a product is torch's own, which it can count."""
    with FlopCounterMode(display=False) as counter:
        module(*inputs)
    return counter.get_total_flops() / (B * T)


@pytest.mark.parametrize("letter", "sfi")
def test_blocks_with_whole_memory_are_what_torch_counts(letter: str) -> None:
    block = build(dataclasses.replace(XL, pattern=letter), V).blocks[0].eval()
    found = counted(block, torch.randn(B, T, D), block.initial_state(B))
    if letter == "s":  # the window of the kernel may be padded: what is certain is the rest
        projections = 4 * 2 * D * D + 2 * 2 * 6 * D * D / T + 2 * 11 * D * D / (B * T)
        assert flops(block, SHAPE) == pytest.approx(projections + 3 * 2 * 11 * D)
        assert projections < found
        return
    assert flops(block, SHAPE) == found


def test_attention_by_hand() -> None:
    config = AllAttentionConfig(num_layers=1, width=D, num_heads=H, num_persistent=7, span=FIXED)
    text = 4 * 2 * D * D + 2 * 2 * 8 * D * D / T + 3 * 2 * 8 * D
    persistent = 2 * 2 * 7 * D
    assert flops(build(config, V).blocks[0], SHAPE) == pytest.approx(text + persistent)


def test_learned_spans_cost_what_they_see() -> None:
    def attention(start: float) -> float:
        span = SpanConfig(limit=256, ramp=2, start=start)
        config = AdaptiveSpanConfig(num_layers=1, width=D, num_heads=H, inner_width=8, span=span)
        return flops(build(config, V).blocks[0], SHAPE)

    near, far = attention(0.0), attention(1.0)
    assert far - near == pytest.approx((256 - 16) * (3 * 2 * D + 2 * 2 * D * D / T))


@pytest.mark.parametrize(("block", "recalled"), [(8, 0), (16, 0), (4, 4 / 2), (2, (2 + 4 + 6) / 4)])
def test_a_gpt_recalls_only_what_its_context_has(block: int, recalled: float) -> None:
    """A block that begins a context of 8 recalls nothing, one in the middle of it 4 positions."""
    model = build(GptConfig(num_layers=1, width=D, num_heads=H, inner_width=20, context=8), V)
    attention = 4 * 2 * D * D + 2 * 2 * D * D * recalled / block + 2 * 2 * 8 * D
    assert model.flops(Shape(B, block)) == pytest.approx(attention + 2 * 2 * D * 20 + 2 * D * V)


def test_sha_rnn_by_hand() -> None:
    model = build(
        ShaRnnConfig(num_layers=1, width=D, inner_width=4 * D, memory_length=9, attention="every"), V
    )
    recurrent, attention, boom = model.blocks
    assert flops(recurrent, SHAPE) == 2 * 8 * D * D
    assert flops(attention, SHAPE) == pytest.approx(2 * D * D + 2 * 2 * 9 * D + 2 * 2 * D * D / (B * T))
    assert flops(boom, SHAPE) == 2 * 4 * D * D
    assert flops(model.head, SHAPE) == 2 * D * V


class AllProbabilities(torch.nn.Module):
    def __init__(self, head: OutputHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return self.head.log_probs(hidden_BTD)


@pytest.mark.parametrize(
    "config",
    [
        XL,
        dataclasses.replace(XL, vocabulary=XLVocabularyConfig(table_width=8)),
        dataclasses.replace(XL, vocabulary=XLVocabularyConfig(cutoffs=(4, 8), division=2)),
        AdaptiveSpanConfig(num_layers=1, width=D, num_heads=H, span=FIXED),
        AdaptiveSpanConfig(num_layers=1, width=D, num_heads=H, vocabulary=VocabularyConfig(cutoffs=(5,))),
        ShaRnnConfig(num_layers=2, width=D, splits=(4, 8)),
    ],
)
def test_reading_and_predicting_are_what_torch_counts(config: ModelConfig) -> None:
    model = build(config, V)
    tokens = torch.zeros(B, T, dtype=torch.long)
    assert flops(model.embedding, SHAPE) == pytest.approx(counted(model.embedding, tokens))
    head = AllProbabilities(model.head)
    assert flops(model.head, SHAPE) == pytest.approx(counted(head, torch.randn(B, T, D)))


def test_a_model_costs_what_its_parts_cost() -> None:
    model = build(dataclasses.replace(XL, pattern="sff"), V)
    parts = [model.embedding, *model.blocks, model.head]
    assert model.flops(SHAPE) == sum(flops(part, SHAPE) for part in parts)


def test_a_supernet_costs_all_its_candidates_and_charges_for_each() -> None:
    training = TrainingConfig(batch_size=B, block_length=T)
    search = SearchConfig(num_blocks=2, candidates="fs")
    model = build_run(RunConfig(model=XL, search=search, training=training), V)
    assert isinstance(model, Supernet)
    both = build(dataclasses.replace(XL, pattern="sf"), V)
    attention, feed_forward = (flops(block, SHAPE) for block in both.blocks)
    assert model.flops(SHAPE) - both.flops(SHAPE) == pytest.approx(attention + feed_forward)
    assert model.costs_K.tolist() == pytest.approx([feed_forward, attention])


def test_gates_count_and_value_embeddings_do_not() -> None:
    plain = ModernConfig(num_layers=1, width=D, num_heads=H, inner_width=20, memory="keys-values", span=FIXED)
    gated = dataclasses.replace(plain, value_embeddings=True)
    more = 2 * 12 * H  # a gate per head, from twelve channels
    assert flops(build(gated, V), SHAPE) == pytest.approx(flops(build(plain, V), SHAPE) + more)
