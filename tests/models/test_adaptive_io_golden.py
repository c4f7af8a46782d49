"""Adaptive input and adaptive softmax against recorded runs of the original code, to the last digit."""

from __future__ import annotations

import pytest
import torch

from longspan.config import EvaluationConfig
from longspan.data.token_file import write_token_file
from longspan.data.tokenizers.character import CharacterTokenizer
from longspan.evaluation import evaluate
from longspan.models import Stack
from longspan.optim.adagrad import Adagrad
from tests.models.golden import Golden, close
from tests.models.test_golden import build_original, loss_and_penalty, memory_lengths


@pytest.fixture(params=["adaptive_io_tied", "adaptive_io_untied", "wiki103_style"])
def golden(request) -> Golden:
    return Golden.load(request.param)


def test_outputs_with_carried_memory(golden):
    model = build_original(golden).eval()
    state, rounding = model.initial_state(golden.tensors["data"].shape[0]), golden.rounding["eval"]
    with torch.no_grad():
        for number, (x, y) in enumerate(golden.blocks()):
            hidden, state = model(x, state)
            nll = model.head.nll(hidden, y)
            close(nll, golden.tensors[f"eval.nll.{number}"], rounding, f"nll {number}")
            close(nll.mean(), golden.tensors[f"eval.loss.{number}"], rounding, f"loss {number}")
            assert memory_lengths(state) == golden.tensors[f"eval.cache_len.{number}"].tolist()
        close(model.embedding(x), golden.tensors["eval.in_emb_last_block"], rounding, "embeddings")
        close(
            model.head.log_probs(hidden),
            golden.tensors["eval.logprob_last_block"],
            rounding,
            "log-probabilities of the last block",
        )


def test_every_gradient(golden):
    model = build_original(golden)
    state = model.initial_state(golden.tensors["data"].shape[0])
    for number, (x, y) in enumerate(golden.blocks()[:2]):
        group = f"grad{number}"
        model.zero_grad()
        loss, total, state = loss_and_penalty(model, x, y, state)
        close(loss, golden.tensors[f"{group}.loss"], golden.rounding[group], "loss")
        close(total, golden.tensors[f"{group}.total_loss"], golden.rounding[group], "loss with penalty")
        total.backward()
        expected = golden.parameters(group)
        if number == 1:
            assert expected.keys() == dict(model.named_parameters()).keys()
        for name, gradient in expected.items():
            close(model.get_parameter(name).grad, gradient, golden.rounding[group], f"{group} of {name}")


def test_a_cluster_that_a_block_lacks_has_gradients_of_zero():
    golden = Golden.load("adaptive_io_untied")
    model = build_original(golden)
    x, y = golden.blocks()[1]
    assert max(x.max(), y.max()) < golden.config().vocabulary.cutoffs[-1]
    hidden, _ = model(x, model.initial_state(x.shape[0]))
    model.head.nll(hidden, y).sum().backward()
    for name in ("embedding.tables.3", "embedding.projections.3", "head.tables.3", "head.biases.3"):
        assert not model.get_parameter(name).grad.any()


def optimizer_of(golden: Golden, model: Stack) -> torch.optim.Optimizer:
    """The original's optimizer with the history its checkpoint holds."""
    settings = golden.original["optim_params"]
    if settings["optim"] == "adagrad":
        optimizer = Adagrad(model.parameters(), lr=settings["lr"], clip=settings["grad_clip"])
        entries = ["sum"]
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=settings["lr"])
        entries = ["exp_avg", "exp_avg_sq"]
    for entry in entries:
        stored = golden.parameters(f"optimizer.{entry}")
        for name, parameter in model.named_parameters():
            optimizer.state[parameter][entry] = stored[name].clone()
    if settings["optim"] == "adam":
        for parameter in model.parameters():
            optimizer.state[parameter]["step"] = torch.tensor(float(golden.updates_before))
    return optimizer


def test_three_updates(golden):
    model = build_original(golden)
    optimizer = optimizer_of(golden, model)
    settings = golden.original["optim_params"]
    state = model.initial_state(golden.tensors["data"].shape[0])
    for number, (x, y) in enumerate(golden.blocks()[:3]):
        rate = settings["lr"] * min(1, (golden.updates_before + number + 1) / settings["lr_warmup"])
        assert rate == pytest.approx(golden.tensors[f"train.lr.{number}"].item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, total, state = loss_and_penalty(model, x, y, state)
        close(loss, golden.tensors[f"train.loss.{number}"], golden.rounding["train"], f"loss {number}")
        model.zero_grad()
        total.backward()
        if settings["optim"] == "adam":
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["grad_clip"])
        optimizer.step()
        model.after_update()
    for name, expected in golden.parameters("step3").items():
        close(model.get_parameter(name), expected, golden.rounding["step3"], name)


def test_full_evaluation_from_tokens_on_disk(golden, tmp_path):
    """The score of a stream, by the original's own way of walking and averaging.

    Five times the recorded rounding would be nothing here: it is 0.0, because the recorded means of blocks
    are float32 and float64 happened to round to the same ones. Their last digit depends on the order of a
    float32 sum, and the evaluator does not round them at all, so one last digit is allowed.
    """
    rows_BN = golden.tensors["full_eval.data"]
    size = golden.original["data_params"]["vocab_size"]
    alphabet = CharacterTokenizer("".join(chr(0x4E00 + number) for number in range(size)))
    text = alphabet.decode(rows_BN.flatten().tolist())
    score = evaluate(
        build_original(golden),
        write_token_file(tmp_path / "stream", alphabet, [text.encode()]),
        tokenizer=alphabet,
        config=EvaluationConfig(protocol="adaptive-span", batch_size=rows_BN.shape[0]),
        block_length=golden.original["model_params"]["block_size"],
        device="cpu",
    )
    last_digit = 2.0**-20  # of a float32 between 8 and 16, where these losses lie
    expected = golden.tensors["full_eval.loss"].item()
    assert score.loss == pytest.approx(expected, rel=0, abs=last_digit)
