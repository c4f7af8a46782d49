"""Checkpoints of GPTs with spans, under the names of several implementations: the same outputs."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import longspan
from longspan.cli import main
from longspan.errors import UserError
from longspan.interop import load_original
from longspan.interop.translation import only_tensors
from tests.models.test_gpt import BIASED, SPANS, make, naive

LAYERS, HEADS = SPANS.num_layers, SPANS.num_heads


def lecture(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A matrix, a span and a causal mask in every head, as in uuzall/adaptive_attention_span."""
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
        made[f"{theirs}.sa.proj.bias"] = weights[f"{ours}.out.bias"]
        for head, z in enumerate(weights[f"{ours}.span.fraction_H"]):
            made[f"{theirs}.sa.heads.{head}.adaptive_span.current_val"] = z.view(1, 1, 1)
            made[f"{theirs}.sa.heads.{head}.adaptive_span.mask_template"] = torch.arange(-8.0, 1.0)
        for kind in ("weight", "bias"):
            made[f"{theirs}.ff.net.0.{kind}"] = weights[f"{inner}.expand.{kind}"]
            made[f"{theirs}.ff.net.2.{kind}"] = weights[f"{inner}.contract.{kind}"]
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


@pytest.mark.parametrize(("layout", "model"), [(lecture, BIASED), (fused, SPANS)], ids=["lecture", "fused"])
@pytest.mark.filterwarnings("ignore:the original's span mask")
@torch.no_grad()
def test_it_computes_what_plain_torch_does(tmp_path, layout, model):
    wanted, path = make(model), tmp_path / "gpt.pth"
    torch.save(layout(dict(wanted.named_parameters())), path)
    found = load_original(path, kind="gpt-spans", config={"adapt_span_ramp": 4}).double()
    tokens = torch.randint(7, (9,))
    hidden, _ = found(tokens[None], found.initial_state(1))
    expected = naive(wanted, tokens, 9, 4, activation=model.activation)
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


@torch.no_grad()
def as_the_original(weights: dict[str, Tensor], tokens_T: Tensor) -> Tensor:
    """Log probabilities of the original's forward pass with one layer.

    Its mask depends on the place of the key in the block: it ends at the last one.
    """
    block = len(tokens_T)

    def apply(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    h = weights["token_embedding_table.weight"][tokens_T] + weights["position_embedding_table.weight"][:block]
    x, heads = norm("blocks.0.ln1", h), []
    for head in range(HEADS):
        here = f"blocks.0.sa.heads.{head}"
        q, k, v = (apply(f"{here}.{part}", x) for part in ("query", "key", "value"))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(block, block).triu(1) > 0, -torch.inf)
        z, template = (weights[f"{here}.adaptive_span.{part}"] for part in ("current_val", "mask_template"))
        mask_T = ((template[-block:] + z.flatten() * 9) / 9 + 1).clamp(0, 1)
        masked = scores.softmax(-1) * mask_T
        heads.append(masked / (masked.sum(-1, keepdim=True) + 1e-8) @ v)
    h = h + apply("blocks.0.sa.proj", torch.cat(heads, dim=-1))
    h = h + apply("blocks.0.ff.net.2", apply("blocks.0.ff.net.0", norm("blocks.0.ln2", h)).relu())
    return apply("lm_head", norm("ln_f", h)).log_softmax(-1)


def one_layer() -> dict[str, Tensor]:
    weights = lecture(dict(make(BIASED).named_parameters()))
    weights = {name: tensor.detach() for name, tensor in weights.items() if not name.startswith("blocks.1")}
    for head, z in enumerate((0.05, 0.4, 0.0)):
        weights[f"blocks.0.sa.heads.{head}.adaptive_span.current_val"].fill_(z)
    return weights


@pytest.mark.parametrize("length", [5, 9])
@torch.no_grad()
def test_the_last_position_of_one_layer_is_that_of_the_original(tmp_path, length):
    weights, path = one_layer(), tmp_path / "gpt.pth"
    torch.save(weights, path)
    with pytest.warns(UserWarning, match=r"place of a key in the block, here on its distance from the query"):
        found = load_original(path, kind="gpt-spans").double()
    assert found.get_parameter("blocks.1.span.fraction_H").tolist() == pytest.approx([0.05, 0.4, 0.0])
    tokens = torch.randint(7, (length,))
    log_probs, _ = found.log_probs(tokens[None], found.initial_state(1))
    expected = as_the_original(weights, tokens)
    torch.testing.assert_close(log_probs[0, -1].double(), expected[-1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(log_probs[0, 1].double(), expected[1], atol=1e-3)  # what the warning says


def test_a_text_gives_the_sorted_characters(tmp_path, capsys):
    text, path, run = tmp_path / "friends.txt", tmp_path / "gpt.pth", tmp_path / "run"
    text.write_text("dcb é\nda\n" * 100, encoding="utf-8")
    torch.save(one_layer(), path)
    words = ["import", str(path), "--kind", "gpt-spans", "--data", str(text), "--out", str(run)]
    assert main(words) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(lines) == 1
    assert lines[0].startswith("longspan: warning: the original's span mask depends on the place of a key")
    found = longspan.load(run, device="cpu")
    assert found.tokenizer.encode("\n abcdé").tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert main(["eval", str(run), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 20
    assert main(["generate", str(run), "--prompt", "dab", "--tokens", "5", "--device", "cpu"]) == 0
    text.write_text("abc\n" * 100)
    assert main([*words[:-1], str(tmp_path / "other")]) == 1
    assert "a vocabulary of 7, but" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks.0.sa.rotary.freqs": torch.ones(3)}, r"not understood: blocks\.0\.sa\.rotary\.freqs"),
        ({"blocks.0.sa.heads.1.key.bias": torch.ones(4)}, r"'layers\.0\.heads\.1\.key\.bias'"),
        (
            {"model.lm_head.weight": torch.ones(7, 12)},
            r"'lm_head\.weight' and 'model\.lm_head\.weight' are both",
        ),
        (
            {"blocks.0.sa.heads.1.span": torch.ones(1)},
            r"heads\.1\.adaptive_span\.current_val' and 'blocks\.0\.sa\.heads\.1\.span' are both read",
        ),
        ({"blocks.0.sa.span": torch.ones(3)}, "layer 0 has a span of its own and spans of its heads"),
        ({"blocks.0.sa.heads.1.adaptive_span.current_val": None}, r"'layers\.0\.heads\.1\.span' is missing"),
        ({"blocks.0.sa.heads.2.adaptive_span.current_val": None}, r"'layers\.0\.heads\.2\.span' is missing"),
        ({"blocks.0.sa.heads.1.adaptive_span.current_val": torch.ones(2)}, r"heads\.1\.span' has a shape"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, changes, message):
    weights = one_layer() | changes
    torch.save({name: tensor for name, tensor in weights.items() if tensor is not None}, tmp_path / "gpt.pth")
    with pytest.raises(UserError, match=message):
        load_original(tmp_path / "gpt.pth", kind="gpt-spans")


def test_options_that_contradict_the_file(tmp_path):
    torch.save(one_layer(), tmp_path / "gpt.pth")
    with pytest.raises(UserError, match="n_head is 2, but a layer has 3 heads"):
        load_original(tmp_path / "gpt.pth", kind="gpt-spans", config={"n_head": 2})


def test_a_prefix_does_not_hide_a_second_tensor():
    tensors = {"decoder.a": torch.ones(1), "a": torch.zeros(1)}
    with pytest.raises(UserError, match="two tensors have the name 'a'"):
        only_tensors(tensors, "decoder.")
