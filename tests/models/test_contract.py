"""Every model keeps the rules of `longspan.testing`. A new architecture joins by a line in VARIANTS."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

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
    TransformerXLConfig,
    VocabularyConfig,
)
from longspan.config.transformer_xl import XLVocabularyConfig
from longspan.models import LanguageModel, Supernet, build_run, memory
from longspan.registry import ARCHITECTURES
from longspan.state import State
from longspan.testing import RULES, check_model
from longspan.testing.probe import Probe
from longspan.testing.reading import blocks_alike, rows_commute

VOCABULARY = 11
SMALL = AdaptiveSpanConfig(
    num_layers=2,
    width=12,
    num_heads=3,
    inner_width=16,
    span=SpanConfig(limit=10, ramp=3, start=0.4, penalty=0.01),
)


ALL_ATTENTION = AllAttentionConfig(num_layers=2, width=12, num_heads=3, num_persistent=5, span=SMALL.span)
WORDS = VocabularyConfig(cutoffs=(3, 7), division=2)
SHA_RNN = ShaRnnConfig(num_layers=2, width=12, inner_width=28, memory_length=10)

TRANSFORMER_XL = TransformerXLConfig(
    num_layers=2, width=12, num_heads=3, head_width=5, inner_width=16, memory_length=10
)
GPT = GptConfig(num_layers=2, width=12, num_heads=3, inner_width=16, context=10)

MODERN = ModernConfig(
    num_layers=2, width=12, num_heads=3, inner_width=16, span=SMALL.span, tied=True, softcap=5.0
)
WINDOWS = ((3, 10, 5), (1, 1, 2))

SAME_LENGTH = dataclasses.replace(TRANSFORMER_XL, same_length=True)


def with_span(**changes) -> AdaptiveSpanConfig:
    return dataclasses.replace(SMALL, span=dataclasses.replace(SMALL.span, **changes))


VARIANTS: dict[str, ModelConfig] = {
    "adaptive-span": SMALL,
    "adaptive-span, long": with_span(limit=200, start=0.02),
    "adaptive-span, full memory": with_span(limit=200, start=0.02, memory="full"),
    "adaptive-span, softmax over layer": with_span(softmax_over="layer"),
    "adaptive-span, not renormalised": with_span(softmax_over="layer", renormalise=False),
    "adaptive-span, one span per layer": with_span(per="layer"),
    "adaptive-span, fixed": with_span(kind="fixed"),
    "adaptive-span, dynamic": with_span(kind="dynamic"),
    "adaptive-span, dynamic, long": with_span(kind="dynamic", limit=200, start=0.1, penalty_full=9),
    "adaptive-span, dynamic, not renormalised": with_span(
        kind="dynamic", softmax_over="layer", renormalise=False
    ),
    "adaptive-span, pre-norm": dataclasses.replace(SMALL, norm="pre"),
    "all-attention": ALL_ATTENTION,
    "all-attention, fixed": dataclasses.replace(ALL_ATTENTION, span=SpanConfig(kind="fixed", limit=10)),
    "all-attention, dynamic": dataclasses.replace(
        ALL_ATTENTION, span=dataclasses.replace(SMALL.span, kind="dynamic")
    ),
    "sha-rnn": SHA_RNN,
    "sha-rnn, attention in every layer": dataclasses.replace(SHA_RNN, attention="every"),
    "sha-rnn, no attention": dataclasses.replace(SHA_RNN, attention="none"),
    "sha-rnn, no memory": dataclasses.replace(SHA_RNN, memory_length=0),
    "sha-rnn, split vocabulary": dataclasses.replace(SHA_RNN, splits=(4, 6, 9)),
    "sha-rnn, weight drop": dataclasses.replace(SHA_RNN, weight_drop=0.4),
    "transformer-xl": TRANSFORMER_XL,
    "transformer-xl, same length": SAME_LENGTH,
    "transformer-xl, clamped": dataclasses.replace(SAME_LENGTH, clamp_length=3, biases="per-layer"),
    "transformer-xl, pre-norm": dataclasses.replace(SAME_LENGTH, norm="pre"),
    "transformer-xl, from zeros": dataclasses.replace(SAME_LENGTH, start="zeros"),
    "transformer-xl, from zeros, pre-norm": dataclasses.replace(TRANSFORMER_XL, start="zeros", norm="pre"),
    "transformer-xl, adaptive softmax": dataclasses.replace(
        TRANSFORMER_XL, vocabulary=XLVocabularyConfig(cutoffs=(4, 8), division=2)
    ),
    "transformer-xl, cluster widths": dataclasses.replace(
        TRANSFORMER_XL,
        vocabulary=XLVocabularyConfig(cutoffs=(4, 8), cluster_widths=(9, 2, 5), divided="head", tied=False),
    ),
    "transformer-xl, learned spans and persistent vectors": dataclasses.replace(
        TRANSFORMER_XL, num_persistent=4, span=SMALL.span
    ),
    "transformer-xl, dynamic spans": dataclasses.replace(
        TRANSFORMER_XL, span=dataclasses.replace(SMALL.span, kind="dynamic")
    ),
    "gpt": dataclasses.replace(GPT, span=SMALL.span),
    "gpt, no spans": GPT,
    "modern": MODERN,
    "modern, keys and values": dataclasses.replace(MODERN, memory="keys-values"),
    "modern, long, keys and values": dataclasses.replace(
        MODERN,
        memory="keys-values",
        span=SpanConfig(limit=400, limit_shortest=9, ramp=3, start=0.9, penalty=0.01, penalty_full=9),
    ),
    "modern, dynamic, keys and values": dataclasses.replace(
        MODERN, memory="keys-values", span=dataclasses.replace(SMALL.span, kind="dynamic")
    ),
    "modern, limits that rise": dataclasses.replace(
        MODERN,
        memory="keys-values",
        qk_norm=False,
        span=SpanConfig(limit=40, limit_shortest=3, ramp=3, start=0.9),
    ),
    "modern, windows": dataclasses.replace(
        MODERN, memory="keys-values", span=SpanConfig(kind="fixed", limit=10, windows=WINDOWS)
    ),
    "modern, plain": dataclasses.replace(
        MODERN,
        positions="none",
        qk_norm=False,
        feed_forward="gelu",
        tied=False,
        softcap=None,
        dropout=0.1,
    ),
    "modern, convolution": dataclasses.replace(MODERN, convolution=3, positions="learned"),
    "modern, n-grams": dataclasses.replace(
        MODERN, ngrams=(2, 4), ngram_rows=150, memory="keys-values", repeat_dropout=0.4
    ),
    "modern, embedding residual": dataclasses.replace(
        MODERN, ngrams=(3,), ngram_rows=50, convolution=2, dropout=0.1
    ),
    "modern, every part": dataclasses.replace(
        MODERN,
        num_layers=5,
        num_heads=2,
        width=16,
        memory="keys-values",
        value_embeddings=True,
        key_offset=True,
        rope_fraction=0.5,
        token_shift=True,
        residual_scalars=True,
        qk_gain=1.4,
        ngrams=(2, 4),
        ngram_rows=150,
    ),
    "modern, swiglu": dataclasses.replace(MODERN, feed_forward="swiglu", qk_norm=False),
    "adaptive-span, windows": with_span(kind="fixed", windows=WINDOWS),
    "adaptive-span, adaptive softmax": dataclasses.replace(SMALL, vocabulary=WORDS),
    "all-attention, tied adaptive softmax": dataclasses.replace(
        ALL_ATTENTION, vocabulary=dataclasses.replace(WORDS, tied=True, cluster_order="forward")
    ),
    "adaptive-span, pattern": dataclasses.replace(SMALL, pattern="ssfif"),
    "transformer-xl, pattern": dataclasses.replace(TRANSFORMER_XL, pattern="fsiff"),
    "transformer-xl, long attention": dataclasses.replace(
        SAME_LENGTH, pattern="sflf", long_memory_length=2 * SAME_LENGTH.memory_length + 1
    ),
    "adaptive-span, dropout": dataclasses.replace(SMALL, dropout=0.2, embedding_dropout=0.1),
}

# What a search trains: mixtures of blocks, and the likeliest of each.
SUPERNETS: dict[str, ModelConfig] = {
    "supernet": TRANSFORMER_XL,
    "supernet, hard": dataclasses.replace(SAME_LENGTH, norm="pre"),
    "supernet, learned spans": SMALL,
    "supernet, learned spans, hard": SMALL,
}
NAMES = [*VARIANTS, *SUPERNETS]


@pytest.fixture(params=NAMES, scope="module")
def model(request) -> LanguageModel:
    """One for all tests of a variant; they leave it as it is."""
    return make(request.param)


def make(variant: str) -> LanguageModel:
    torch.manual_seed(3)
    model = fresh(variant)
    with torch.no_grad():  # spans that differ from head to head, norms that do not leave zero where it is
        for name, parameter in model.named_parameters():
            if name.endswith("fraction_H"):
                parameter.add_(torch.rand_like(parameter) * 0.3)
            if name.endswith("logits_K"):  # every kind of block is the likeliest somewhere
                parameter[int(name.split(".")[1])] += 1
            if not parameter.any() and name.endswith(
                ("weight", "weight_ND", "again_D")
            ):  # what begins by adding nothing
                parameter.normal_(std=0.3)
            if name.endswith("norm.bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.after_update()
    settle(model, variant)
    return model


def fresh(variant: str) -> LanguageModel:
    if variant in VARIANTS:
        config = RunConfig(model=VARIANTS[variant])
    else:
        config = RunConfig(model=SUPERNETS[variant], search=SearchConfig(num_blocks=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "physical_memory", lambda: None)  # else all is built twice, to know its size
        return build_run(config, VOCABULARY).double().eval()


def settle(model: LanguageModel, variant: str) -> None:
    if variant.endswith("hard"):
        assert isinstance(model, Supernet)
        assert model.pattern() == "sfi"
        for block, letter in zip(model.blocks, model.pattern(), strict=True):
            block.chosen = letter


def random_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(5))


def warm_state(model: LanguageModel, batch: int) -> State:
    """A state in the middle of a text."""
    with torch.no_grad():
        return model(random_tokens(batch, 7) * 0 + torch.arange(batch)[:, None], model.initial_state(batch))[
            1
        ]


def copies(state: State) -> dict[str, Tensor]:
    return {name: leaf.clone() for name, leaf in state.flatten().items()}


def equal(one: State, other: State | dict[str, Tensor]) -> bool:
    other = other.flatten() if isinstance(other, State) else other
    leaves = one.flatten()
    return leaves.keys() == other.keys() and all(torch.equal(leaves[name], other[name]) for name in leaves)


def assert_close(one: State, other: State) -> None:
    torch.testing.assert_close(one.flatten(), other.flatten(), rtol=1e-9, atol=1e-11)


def test_every_architecture_is_held_to_the_contract():
    assert {ARCHITECTURES.name_of(type(config)) for config in VARIANTS.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("rule", RULES)
def test_the_contract(model, rule):
    check_model(model, [rule])


@settings(max_examples=12, deadline=None)
@given(variant=st.sampled_from(sorted(NAMES)), rows=st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_select_commutes_with_forward(variant, rows):
    rows_commute(Probe(make(variant)), [rows])


@settings(max_examples=15, deadline=None)
@given(
    variant=st.sampled_from(sorted(NAMES)),
    cuts=st.lists(st.integers(1, 15), min_size=1, max_size=5).filter(lambda cuts: sum(cuts) <= 24),
)
def test_however_the_text_is_cut(variant, cuts):
    """Token by token equals one block equals many blocks, where the model says so."""
    model = make(variant)
    assume(model.block_invariant)
    blocks_alike(Probe(model), [cuts])


def test_the_state_keeps_no_larger_tensors_in_memory(model):
    """Views of a block's activations would keep all of them from one block to the next."""
    with torch.no_grad():
        _, state = model(random_tokens(2, 64), model.initial_state(2))  # longer than every memory
    for name, leaf in state.flatten().items():
        assert leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size(), name


def test_the_state_has_names(model):
    flat = warm_state(model, 2).flatten()
    assert flat
    assert all(name.startswith(("blocks.", "ngrams.")) for name in flat)


def test_what_is_not_stored_is_constant_or_set_before_every_step(model):
    stored = model.state_dict()
    everything = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    constants = {"ngrams.powers_CN", "ngrams.rows_C"}
    set_before_every_step = {"ngrams.row_dropout", "blocks.0.output_dropout.probability"}
    assert everything - stored.keys() <= constants | set_before_every_step


@pytest.mark.parametrize("variant", NAMES)
def test_weights_move_to_another_model(variant):
    """Sizes that are derived from weights follow when weights are loaded."""
    model = make(variant)
    twin = fresh(variant)
    twin.load_state_dict(model.state_dict())
    settle(twin, variant)
    tokens = random_tokens(2, 9)
    expected, state = model(tokens, model.initial_state(2))
    found, twin_state = twin(tokens, twin.initial_state(2))
    torch.testing.assert_close(found, expected)
    assert_close(twin_state, state)
