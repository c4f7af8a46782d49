"""Transformer-XL against recorded runs of the original code and of Hugging Face's, to the last digit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.models import LanguageModel, build
from longspan.state import State
from tests.models.golden import close
from tests.models.transformer_xl_golden import CASES, CASES_WITH_UPDATES, Golden


@pytest.fixture(params=CASES)
def golden(request) -> Golden:
    return Golden.load(request.param)


def build_original(golden: Golden, **lengths: Any) -> LanguageModel:
    model = build(golden.config(**lengths), golden.vocabulary_size)
    own, weights = dict(model.named_parameters()), golden.parameters("weights")
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    return model


def lengths_of(golden: Golden, group: str) -> dict[str, Any]:
    """evalB has other lengths than the model was built with."""
    settings = golden.facts["model" if group == "evalA" else "eval_settings"]
    return {name: settings[name] for name in ("mem_len", "clamp_len", "same_length")}


@pytest.mark.parametrize("group", ["evalA", "evalB"])
def test_outputs_with_carried_memory(golden, group):
    model = build_original(golden, **lengths_of(golden, group)).eval()
    blocks, rounding = golden.blocks(group), golden.rounding[group]
    state = model.initial_state(blocks[0][0].shape[0])
    nll_name = "nll_next_token" if golden.hugging_face else "nll"
    with torch.no_grad():
        for number, (x, y) in enumerate(blocks):
            hidden, state = model(x, state)
            hidden = hidden[:, -y.shape[1] :]
            nll = model.head.nll(hidden, y)
            close(nll, golden.batch_first(f"{group}.{nll_name}.{number}"), rounding, f"nll {number}")
            if not golden.hugging_face:
                remembered = golden.tensors[f"{group}.mem_len_after.{number}"].item()
                assert memory_filled(state) == {remembered}
        last = "logprob.4" if golden.hugging_face else "logprob_last_block"
        expected = golden.batch_first(f"{group}.{last}")
        close(model.head.log_probs(hidden), expected, rounding, "log-probabilities")


def test_half_precision_stays_close():
    golden = Golden.load("txl_prenorm_untied")
    model = build_original(golden)
    x, y = golden.blocks("evalA")[0]
    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            hidden, state = model(x, model.initial_state(x.shape[0]))
            hidden, _ = model(x, state)  # with a memory
            losses.append(model.head.nll(hidden, y).mean())
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0)


def memory_filled(state: State) -> set[int]:
    counters = [leaf for name, leaf in state.flatten().items() if name.endswith("filled")]
    return set(torch.cat(counters).tolist())


def loss_of_block(golden: Golden, model: LanguageModel, k: int, state: State) -> tuple[Tensor, State]:
    x, y = golden.blocks("evalA")[k]
    hidden, state = model(x, state)
    if golden.hugging_face:  # targets are shifted inside the block
        hidden, y = hidden[:, :-1], x[:, 1:]
    # In float64, since the last digit of a mean in float32 may be more than all rounding before it.
    return model.head.nll(hidden[:, -y.shape[1] :], y).double().mean(), state.detach()


def test_every_gradient(golden):
    model = build_original(golden)
    state = model.initial_state(golden.blocks("evalA")[0][0].shape[0])
    for number in range(2):
        group = f"grad{number}"
        model.zero_grad()
        loss, state = loss_of_block(golden, model, number, state)
        close(loss, golden.tensors[f"{group}.loss"], golden.rounding[group], "loss")
        loss.backward()
        expected = golden.parameters(group)
        if number == 1:
            assert expected.keys() == dict(model.named_parameters()).keys()
        for name, gradient in expected.items():
            close(model.get_parameter(name).grad, gradient, golden.rounding[group], f"{group} of {name}")


def three_updates(golden: Golden, model: LanguageModel, adam: torch.optim.Adam, prefix: str) -> None:
    settings = golden.facts["train"]
    state = model.initial_state(golden.blocks("evalA")[0][0].shape[0])
    for number in range(3):
        rate = golden.tensors.get(f"{prefix}train.lr.{number}", torch.tensor(settings["lr"]))
        adam.param_groups[0]["lr"] = rate.item()
        adam.zero_grad()
        loss, state = loss_of_block(golden, model, number, state)
        expected = golden.tensors[f"{prefix}train.loss.{number}"]
        close(loss, expected, golden.rounding[f"{prefix}train"], f"loss {number}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        adam.step()
    group = f"{prefix}step3"
    for name, weight in golden.parameters(group).items():
        # The true gradient of R's slow waves is 0, and Adam makes full steps of its rounding.
        rounding = golden.rounding[f"{group}(r_net)" if "positions.project" in name else group]
        close(model.get_parameter(name), weight, rounding, name)


@pytest.mark.parametrize("case", CASES_WITH_UPDATES)
def test_three_updates(case):
    golden = Golden.load(case)
    model = build_original(golden)
    three_updates(golden, model, torch.optim.Adam(model.parameters()), "")


def test_three_updates_go_on_from_a_stored_optimizer():
    golden = Golden.load("txl_basic")
    model = build_original(golden)
    adam = torch.optim.Adam(model.parameters())
    mean, square = (golden.parameters(f"optimizer.{key}") for key in ("exp_avg", "exp_avg_sq"))
    step = torch.tensor(float(golden.facts["updates_before"]))
    for name, weight in model.named_parameters():
        adam.state[weight] = {"step": step.clone(), "exp_avg": mean[name], "exp_avg_sq": square[name]}
    three_updates(golden, model, adam, "restart_")


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("txl")])
def test_evaluation_in_shorter_blocks_with_a_longer_memory(case):
    """Without a memory, blocks begin `ext_len` tokens before what is scored."""
    golden = Golden.load(case)
    block, trained = golden.facts["train"]["eval_tgt_len"], golden.facts["model"]
    longer = trained["mem_len"] + trained["tgt_len"] - block
    model = build_original(golden, mem_len=longer if trained["mem_len"] else 0)
    model = model.double().eval()  # the mean has fewer digits to lose than float32 rounds away
    data = golden.batch_first("data")
    state, nats = model.initial_state(data.shape[0]), []
    with torch.no_grad():
        for begin, y in zip(range(0, data.shape[1] - 1, block), data[:, 1:].split(block, 1), strict=True):
            x = data[:, max(0, begin - trained["ext_len"]) : begin + y.shape[1]]
            hidden, state = model(x, state)
            nats.append(model.head.nll(hidden[:, -y.shape[1] :], y).double())
    close(torch.cat(nats, 1).mean(), golden.tensors["evaluate.loss"], golden.rounding["evaluate"], "loss")
