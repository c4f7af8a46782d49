"""Checkpoints of GPTs with spans, under the names of several implementations: the same outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.cli import main
from longspan.errors import UserError
from longspan.interop import load_original
from tests.models.test_gpt import SPANS, make, naive

LAYERS, HEADS = SPANS.num_layers, SPANS.num_heads


def lecture(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A matrix for every head, and a causal mask in each."""
    made = {
        "token_embedding_table.weight": weights["embedding.weight"],
        "position_embedding_table.weight": weights["blocks.0.table.weight"],
    }
    for layer in range(LAYERS):
        ours, inner, theirs = f"blocks.{2 * layer + 1}", f"blocks.{2 * layer + 2}", f"blocks.{layer}"
        for part in ("query", "key", "value"):
            for head, own in enumerate(weights[f"{ours}.{part}.weight"].chunk(HEADS)):
                made[f"{theirs}.sa.heads.{head}.{part}.weight"] = own
                made[f"{theirs}.sa.heads.{head}.tril"] = torch.ones(9, 9).tril()
        made[f"{theirs}.sa.proj.weight"] = weights[f"{ours}.out.weight"]
        made[f"{theirs}.sa.proj.bias"] = torch.zeros(12)
        made[f"{theirs}.sa.adaptive_mask.current_val"] = weights[f"{ours}.span.fraction_H"].view(-1, 1, 1)
        for kind in ("weight", "bias"):
            made[f"{theirs}.ffwd.net.0.{kind}"] = weights[f"{inner}.expand.{kind}"]
            made[f"{theirs}.ffwd.net.2.{kind}"] = weights[f"{inner}.contract.{kind}"]
            made[f"{theirs}.ln1.{kind}"] = weights[f"{ours}.norm.{kind}"]
            made[f"{theirs}.ln2.{kind}"] = weights[f"{inner}.norm.{kind}"]
    for kind in ("weight", "bias"):
        made[f"ln_f.{kind}"] = weights[f"final_norm.{kind}"]
        made[f"lm_head.{kind}"] = weights[f"head.scores.{kind}"]
    return made


def fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Query, key and value in one matrix; positions with a dimension in front; a wrapper's prefix."""
    made = {
        "transformer.wte.weight": weights["embedding.weight"],
        "transformer.wpe": weights["blocks.0.table.weight"][None],
    }
    for layer in range(LAYERS):
        ours, inner, theirs = f"blocks.{2 * layer + 1}", f"blocks.{2 * layer + 2}", f"transformer.h.{layer}"
        parts = [weights[f"{ours}.{part}.weight"] for part in ("query", "key", "value")]
        made[f"{theirs}.attn.c_attn.weight"] = torch.cat(parts)
        made[f"{theirs}.attn.c_proj.weight"] = weights[f"{ours}.out.weight"]
        made[f"{theirs}.attn.bias"] = torch.ones(1, 1, 9, 9).tril()
        made[f"{theirs}.attn.span._mask.current_val"] = weights[f"{ours}.span.fraction_H"]
        for kind in ("weight", "bias"):
            made[f"{theirs}.mlp.c_fc.{kind}"] = weights[f"{inner}.expand.{kind}"]
            made[f"{theirs}.mlp.c_proj.{kind}"] = weights[f"{inner}.contract.{kind}"]
            made[f"{theirs}.ln_1.{kind}"] = weights[f"{ours}.norm.{kind}"]
            made[f"{theirs}.ln_2.{kind}"] = weights[f"{inner}.norm.{kind}"]
    for kind in ("weight", "bias"):
        made[f"transformer.ln_f.{kind}"] = weights[f"final_norm.{kind}"]
        made[f"lm_head.{kind}"] = weights[f"head.scores.{kind}"]
    return {f"module.{name}": tensor for name, tensor in made.items()}


@pytest.mark.parametrize("layout", [lecture, fused])
@torch.no_grad()
def test_it_computes_what_plain_torch_does(tmp_path, layout):
    wanted, path = make(SPANS), tmp_path / "gpt.pth"
    torch.save(layout(dict(wanted.named_parameters())), path)
    found = load_original(path, kind="gpt-spans", config={"adapt_span_ramp": 4}).double()
    tokens = torch.randint(7, (9,))
    hidden, _ = found(tokens[None], found.initial_state(1))
    expected = naive(wanted, tokens, 9, 4)
    torch.testing.assert_close(hidden[0], expected, rtol=1e-4, atol=1e-4)
    scores = F.linear(
        expected, wanted.get_parameter("head.scores.weight"), wanted.get_parameter("head.scores.bias")
    )
    log_probs, _ = found.log_probs(tokens[None], found.initial_state(1))
    torch.testing.assert_close(log_probs[0].double(), scores.log_softmax(-1), rtol=1e-3, atol=1e-3)


def test_by_default_the_ramp_is_as_long_as_the_context(tmp_path, capsys):
    weights, path = fused(dict(make(SPANS).named_parameters())), tmp_path / "gpt.pth"
    torch.save({"model_state_dict": weights, "optimizer": {}, "step": 7}, path)
    run = tmp_path / "run"
    assert main(["import", str(path), "--kind", "gpt-spans", "--out", str(run)]) == 0
    config = (run / "config.toml").read_text()
    assert "ramp = 9" in config
    assert main(["generate", str(run), "--prompt", "3 1 4", "--tokens", "5", "--device", "cpu"]) == 0


def test_tensors_that_are_not_understood_are_named(tmp_path):
    weights, path = lecture(dict(make(SPANS).named_parameters())), tmp_path / "gpt.pth"
    weights["blocks.0.sa.rotary.freqs"] = torch.ones(3)
    torch.save(weights, path)
    with pytest.raises(UserError, match=r"not understood: blocks\.0\.sa\.rotary\.freqs"):
        load_original(path, kind="gpt-spans")
    del weights["blocks.0.sa.rotary.freqs"]
    weights["blocks.1.sa.proj.bias"] = torch.ones(12)
    torch.save(weights, path)
    with pytest.raises(UserError, match=r"'layers\.1\.out\.bias' is not zero"):
        load_original(path, kind="gpt-spans")
