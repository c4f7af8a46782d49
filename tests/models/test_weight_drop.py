"""Dropout on the recurrent matrices of SHA-RNN's LSTMs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from longspan.config import RunConfig, ShaRnnConfig, schema
from longspan.layers import lstm
from longspan.layers.lstm import LSTMBlock
from longspan.models import build
from longspan.models.pipeline import pipelined
from longspan.training import resume, train

from ..training.runs import outcome, write_text

SMALL = ShaRnnConfig(num_layers=2, width=8, inner_width=16, memory_length=12, weight_drop=0.5)


def block_with_mask(drop: float = 0.5) -> tuple[LSTMBlock, nn.LSTM, torch.Tensor]:
    """A block, a plain LSTM with the recurrent matrix that seed 7 leaves of the block's, and that mask."""
    torch.manual_seed(0)
    block = LSTMBlock(6, dropout=0.0, epsilon=1e-12, weight_drop=drop).double()
    plain = nn.LSTM(6, 6, batch_first=True).double()
    plain.load_state_dict(block.lstm.state_dict())
    torch.manual_seed(7)
    mask = nn.functional.dropout(torch.ones_like(plain.weight_hh_l0), drop)
    with torch.no_grad():
        plain.weight_hh_l0.mul_(mask)
    return block, plain, mask


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_output_and_gradients_are_those_of_an_lstm_with_the_dropped_matrix(scale, monkeypatch):
    monkeypatch.setattr(lstm, "_precision", lambda h: (h.dtype, scale))
    block, plain, mask = block_with_mask()
    assert 0 < int((mask == 0).sum()) < mask.numel()
    h = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.manual_seed(7)
    out, state = block(h, block.initial_state(2))
    expected, (hidden, cell) = plain(block.norm(h))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state.tensor("hidden"), hidden[0])
    torch.testing.assert_close(state.tensor("cell"), cell[0])
    ours = torch.autograd.grad(out.square().sum(), list(block.lstm.parameters()))
    theirs = list(torch.autograd.grad(expected.square().sum(), list(plain.parameters())))
    theirs[1] = theirs[1] * mask  # the only weights that the mask stands before
    torch.testing.assert_close(list(ours), theirs)


def test_all_chunks_of_a_pipeline_have_the_same_mask():
    block, plain, _ = block_with_mask()
    h = torch.randn(2, 7, 6, dtype=torch.float64)
    torch.manual_seed(7)
    out, (state,) = pipelined([block], h, [block.initial_state(2)], 3)
    expected, (hidden, _) = plain(block.norm(h))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state.tensor("hidden"), hidden[0])


def test_every_block_of_tokens_has_its_own_mask_and_evaluation_has_none():
    block, *_ = block_with_mask()
    h, state = torch.randn(2, 5, 6, dtype=torch.float64), block.initial_state(2)
    first, second = block(h, state)[0], block(h, state)[0]
    assert torch.equal(first[:, 0], second[:, 0])  # before the first step there is nothing to recur to
    assert not torch.allclose(first[:, 1:], second[:, 1:])
    block.eval()
    undropped, *_ = block_with_mask(drop=0.0)
    assert torch.equal(block(h, state)[0], undropped(h, state)[0])


def test_every_lstm_of_the_model_drops_and_without_it_no_random_number_is_drawn():
    drops = [part.weight_drop for part in build(SMALL, 9).modules() if isinstance(part, LSTMBlock)]
    assert drops == [0.5, 0.5]
    model = build(schema.read(ShaRnnConfig, {**schema.write(SMALL), "weight_drop": 0.0}), 9)
    before = torch.get_rng_state()
    model(torch.zeros(1, 4, dtype=torch.long), model.initial_state(1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("value", [1.0, -0.1])
def test_a_probability_outside_its_range_is_refused(value):
    with pytest.raises(ValueError, match="weight_drop must be at least 0 and below 1"):
        ShaRnnConfig(weight_drop=value)


def test_a_resumed_run_draws_the_same_masks(tmp_path: Path):
    def config(steps: int) -> RunConfig:
        table = {
            "data": {"corpus": str(write_text(tmp_path))},
            "model": {"architecture": "sha-rnn", **schema.write(SMALL)},
            "training": {"batch_size": 2, "block_length": 12, "device": "cpu", "evaluate_every": 4},
            "stage": [{"steps": steps, "learning_rate": 0.01}],
            "evaluation": {"max_tokens": 100},
        }
        return schema.read(RunConfig, table)

    whole = train(config(8), tmp_path / "whole").path
    part = train(config(4), tmp_path / "part").path
    settings = (whole / "config.toml").read_text()
    (part / "config.toml").write_text(settings)
    resume(part)
    found, expected = outcome(part)["last"][1], outcome(whole)["last"][1]
    assert found == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_on_a_gpu_dropped_weights_get_no_gradient_and_all_others_do(compiled, precision):
    torch.manual_seed(0)
    config = ShaRnnConfig(num_layers=2, width=64, inner_width=128, memory_length=32, weight_drop=0.5)
    model = build(config, 9).cuda()
    if compiled:
        model.compile()
    tokens = torch.randint(9, (2, 40), device="cuda")
    with torch.autocast("cuda", precision, enabled=precision != torch.float32):
        hidden, _ = model(tokens, model.initial_state(2))
    hidden.float().square().sum().backward()
    for block in model.modules():
        if isinstance(block, LSTMBlock):
            dropped = (block.lstm.weight_hh_l0.grad == 0).float().mean().item()
            kept = (block.lstm.weight_ih_l0.grad == 0).float().mean().item()
            assert dropped == pytest.approx(0.5, abs=0.05)
            assert kept < 0.01
