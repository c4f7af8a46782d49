"""Checkpoints of other sizes than the recorded ones, cut from them: the shapes tell what they are."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from longspan.config import ModelConfig
from longspan.interop.original import read_original
from tests.interop.checkpoints import Original

NUMBERS = ("num_layers", "num_heads", "width", "inner_width")


def read(made: Original, tmp_path, **options) -> tuple[ModelConfig, int]:
    """What is found of a file that runs, with no options but those that no shape tells."""
    made.options = {}
    config, model = read_original(made.save(tmp_path / "c.pt"), made.kind, options)
    with torch.no_grad():
        log_probs, _ = model.log_probs(torch.tensor([[0, 1, 2]]), model.initial_state(1))
    assert torch.isfinite(log_probs).all()
    return config, model.vocabulary_size


def numbers(config: ModelConfig) -> tuple[int, ...]:
    return tuple(getattr(config, name) for name in NUMBERS)


def drop(made: Original, pattern: str) -> None:
    made.tensors = {name: t for name, t in made.tensors.items() if not re.match(pattern, name)}


def change(made: Original, pattern: str, how) -> None:
    """The tensors with such names, tied ones together."""
    done: dict[int, Tensor] = {}
    for name, tensor in made.tensors.items():
        if re.fullmatch(pattern, name):
            made.tensors[name] = done.setdefault(tensor.data_ptr(), how(tensor).contiguous())


@pytest.mark.parametrize(
    "case", ["adaptive_span_trim", "fairseq_adaptive_span", "fairseq_adaptive_span_layer"]
)
def test_adaptive_span_with_narrower_heads_more_of_them_and_a_layer_less(tmp_path, case):
    made = Original.of(case)
    whole, size = read(made, tmp_path)
    drop(made, rf"layers\.{whole.num_layers - 1}\.")
    change(made, "key_pe", lambda keys: keys[:, : keys.shape[1] // 2, :100])
    change(made, r".*current_val", lambda z: z.repeat(2, 1, 1) if z.dim() == 3 else z)
    change(made, r"(in|out)_emb\.(weight|bias)", lambda rows: rows[:37])
    found, fewer = read(made, tmp_path)
    assert size == 60
    assert fewer == 37
    assert found.span.limit == 100
    assert numbers(found) == (whole.num_layers - 1, 2 * whole.num_heads, whole.width, whole.inner_width)


def test_all_attention_with_other_slots(tmp_path):
    made = Original.of("all_attention_adaptive")
    change(made, r".*persistent_memory\.key", lambda keys_HKP: keys_HKP[..., :5])
    change(made, r".*persistent_memory\.val", lambda values_HPK: values_HPK[:, :5])
    assert read(made, tmp_path)[0].num_persistent == 5


@pytest.mark.parametrize("case", ["adaptive_io_tied", "adaptive_io_untied"])
def test_adaptive_softmax_with_a_cluster_less(tmp_path, case):
    made = Original.of(case)
    whole, _ = read(made, tmp_path)
    clusters = len(whole.vocabulary.cutoffs)
    drop(made, rf"(in|out)_emb\.(emb|out)_(layers|projs)\.{clusters}(\.|$)")
    change(made, r"out_emb\.cluster_proj\..*", lambda rows: rows[:-1])
    change(made, r"(in_emb\.emb|out_emb\.out)_layers\.0\..*", lambda rows: rows[:-3])
    found, size = read(made, tmp_path)
    assert found.vocabulary.cutoffs == tuple(cut - 3 for cut in whole.vocabulary.cutoffs[:-1])
    assert size == whole.vocabulary.cutoffs[-1] - 3
    assert found.vocabulary.tied == whole.vocabulary.tied
    assert found.vocabulary.division == whole.vocabulary.division


@pytest.mark.parametrize(
    "case", ["txl_basic", "txl_prenorm_untied", "txl_adaptive_div2", "hf_transfo_xl_untie_r"]
)
def test_transformer_xl_with_fewer_heads_and_layers(tmp_path, case):
    made = Original.of(case)
    whole, size = read(made, tmp_path)
    heads, inner = whole.num_heads // 2, whole.inner_width - 5
    rows = heads * whole.head_width
    drop(made, rf"(transformer\.)?layers\.{whole.num_layers - 1}\.")
    change(made, r".*r_[wr]_bias", lambda biases: biases[:heads])
    change(made, r".*r_net\.weight", lambda matrix: matrix[:rows])
    change(made, r".*qkv_net\.weight", lambda m: torch.cat([part[:rows] for part in m.chunk(3)]))
    change(made, r".*o_net\.weight", lambda matrix: matrix[:, :rows])
    change(made, r".*CoreNet\.0\..*", lambda part: part[:inner])
    change(made, r".*CoreNet\.3\.weight", lambda matrix: matrix[:, :inner])
    found, same_size = read(made, tmp_path)
    assert numbers(found) == (whole.num_layers - 1, heads, whole.width, inner)
    assert found.vocabulary == whole.vocabulary
    assert same_size == size


def test_transformer_xl_with_a_cluster_less(tmp_path):
    made = Original.of("txl_adaptive_div2")
    whole, _ = read(made, tmp_path)
    clusters = len(whole.vocabulary.cutoffs)
    drop(made, rf"(word_emb\.emb|crit\.out)_(layers|projs)\.{clusters}(\.|$)")
    change(made, r"crit\.cluster_.*", lambda rows: rows[:-1])
    found, size = read(made, tmp_path)
    assert found.vocabulary.cutoffs == whole.vocabulary.cutoffs[:-1]
    assert size == whole.vocabulary.cutoffs[-1]
    assert found.vocabulary.tied_projections == whole.vocabulary.tied_projections


def test_one_table_with_cutoffs_that_only_options_tell(tmp_path):
    made = Original.of("txl_adaptive_div1")
    assert read(made, tmp_path, cutoffs=[30, 70])[0].vocabulary.cutoffs == (30, 70)


@pytest.mark.parametrize("attention", ["none", "second-last"])
def test_sha_rnn_with_two_layers_and_attention_or_none(tmp_path, attention):
    made = Original.of("sha_rnn")
    whole, _ = read(made, tmp_path)
    first = whole.num_layers - 2
    drop(made, rf"blocks\.(?!{first}\.|{first + 1}\.)")
    made.tensors = {
        re.sub(r"^blocks\.(\d+)", lambda m: f"blocks.{int(m[1]) - first}", name): t
        for name, t in made.tensors.items()
    }
    if attention == "none":
        drop(made, r"blocks\.\d+\.attn\.")
    change(made, r"(encoder|decoder)\..*", lambda rows: rows[:50])
    found, size = read(made, tmp_path)
    assert (found.num_layers, found.attention, size) == (2, attention, 50)
