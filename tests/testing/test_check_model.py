"""A sound model passes, and for every rule there is a model that breaks it and is told which."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longspan
from longspan.models.interface import LanguageModel
from longspan.output import SoftmaxHead
from longspan.state import State
from longspan.testing import RULES, ContractError, check_model

VOCABULARY, WIDTH = 9, 6


class Sound(LanguageModel):
    """h_t = tanh(mix e_t + keep h_{t-1}): the smallest model with a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary_size = VOCABULARY
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.keep = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = SoftmaxHead(WIDTH, VOCABULARY)

    def initial_state(self, batch_size: int) -> State:
        return State({"hidden": self.embedding.weight.new_zeros(batch_size, WIDTH)})

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden_BTD, last_BD = self.run(self.mix(self.embedding(tokens_BT)), state.tensor("hidden"))
        return hidden_BTD, State({"hidden": last_BD})

    def run(self, inputs_BTD: Tensor, hidden_BD: Tensor) -> tuple[Tensor, Tensor]:
        steps = []
        for input_BD in inputs_BTD.unbind(1):
            hidden_BD = torch.tanh(input_BD + self.keep(hidden_BD)).to(hidden_BD.dtype)
            steps.append(hidden_BD)
        return torch.stack(steps, 1), hidden_BD


class WrongShape(Sound):
    def initial_state(self, batch_size: int) -> State:
        return State({"hidden": super().initial_state(batch_size).tensor("hidden").t()})

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, State({"hidden": state.tensor("hidden").t()}))
        return hidden, State({"hidden": after.tensor("hidden").t()})


class NotNormalised(Sound):
    class Head(SoftmaxHead):
        def log_probs(self, hidden_BTD: Tensor) -> Tensor:
            return super().log_probs(hidden_BTD) + 0.1

    def __init__(self) -> None:
        super().__init__()
        self.head = self.Head(WIDTH, VOCABULARY)


class OtherNll(Sound):
    class Head(SoftmaxHead):
        def nll(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
            return super().nll(hidden_BTD, targets_BT) * 1.01

    def __init__(self) -> None:
        super().__init__()
        self.head = self.Head(WIDTH, VOCABULARY)


class NllInHalf(Sound):
    class Head(SoftmaxHead):
        def nll(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
            return super().nll(hidden_BTD, targets_BT).double()

    def __init__(self) -> None:
        super().__init__()
        self.head = self.Head(WIDTH, VOCABULARY)


class InPlace(Sound):
    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, state)
        state.tensor("hidden").copy_(after.tensor("hidden").detach())
        return hidden, after


class Hidden(Sound):
    """Remembers the mean of what it read last in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, state)
        hidden = hidden + self.seen
        self.seen = hidden.detach().mean((0, 1))
        return hidden, after


class Counts(Sound):
    """Changes a buffer that nothing reads, as a BatchNorm's counter is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("blocks", torch.zeros(1))

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        self.blocks += 1
        return super().forward(tokens_BT, state)


class Forgets(Sound):
    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        return super().forward(tokens_BT, state.map(lambda leaf: leaf * 0))


class ByPlace(Sound):
    """What a text gives depends on its place in the batch."""

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, state)
        return hidden * (1 + torch.arange(len(hidden))[:, None, None]), after


class MixesRows(Sound):
    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, state)
        return hidden - 0.1 * hidden.mean(0, keepdim=True), after


class SeesFuture(Sound):
    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, state)
        return hidden + 0.1 * hidden.roll(-1, 1), after


class ZerosAreNotTheBeginning(Sound):
    """A state of zeros in which the initial state is not: `reset` makes another text than `initial_state`."""

    def initial_state(self, batch_size: int) -> State:
        return State(
            {"hidden": super().initial_state(batch_size).tensor("hidden"), "old": torch.zeros(batch_size)}
        )

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, State({"hidden": state.tensor("hidden")}))
        # A row that begins beside rows that do not is taken for one of them.
        old = state.tensor("old").max().expand(len(hidden)) + 1
        return hidden + (old > 1)[:, None, None] * 0.1, State({**after, "old": old})


class ByBlock(Sound):
    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, state)
        return hidden / tokens_BT.shape[1], after


class OtherDecoding(Sound):
    def decoding_state(self, state: State) -> State:
        return state.map(lambda leaf: leaf * 1.1)


class OtherLongDecoding(Sound):
    """Wrong only once a text has begun, and only where states are flattened between tokens."""

    def decoding_state(self, state: State) -> State:
        return State({"prepared": state})

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        prepared = "prepared" in state
        hidden, after = super().forward(tokens_BT, state.branch("prepared") if prepared else state)
        return hidden, after.map(lambda leaf: -leaf) if prepared else after


class Labelled(State):
    """A state with something beside its tensors."""

    label = 1.0


class LosesLabel(Sound):
    def initial_state(self, batch_size: int) -> State:
        return Labelled(super().initial_state(batch_size))

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, state)
        return hidden * getattr(state, "label", 0.5), Labelled(after)


class StoredTwice(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.keep


class NotStored(Sound):
    """A size that is derived from weights and not derived again when weights are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.after_update()

    def after_update(self) -> None:
        self.derived = float(self.scale.detach())

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, state)
        return hidden * self.derived + self.scale * 0.1, after


class Copies(Sound):
    """Uses a copy of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.after_update()

    def after_update(self) -> None:
        self.copied = (self.keep.weight,)

    def run(self, inputs_BTD: Tensor, hidden_BD: Tensor) -> tuple[Tensor, Tensor]:
        if self.keep.weight is not self.copied[0]:  # somebody's weights: too bad
            inputs_BTD = inputs_BTD * 2
        return super().run(inputs_BTD, hidden_BD)


class Unused(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


class Detaches(Sound):
    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, state)
        return hidden, after.detach()


class NotFinite(Sound):
    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, after = super().forward(tokens_BT, state)
        zero = (self.mix.bias[0] - self.mix.bias[0]).abs()
        return hidden + zero.sqrt(), after  # the gradient of sqrt at 0, times 0


class KeepsHalf(Sound):
    def run(self, inputs_BTD: Tensor, hidden_BD: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.is_autocast_enabled("cpu"):
            return super().run(inputs_BTD, hidden_BD)
        hidden_BTD, last_BD = super().run(inputs_BTD, hidden_BD)
        return hidden_BTD, last_BD * 0 + 3


class Penalty(Sound):
    def penalties(self) -> dict[str, Tensor]:
        return {"mine": self.keep.weight.abs().sum(0)}


class Infinite(Sound):
    def diagnostics(self) -> dict[str, Tensor]:
        return {"mine": torch.tensor([1.0, torch.inf])}


class Unhashable(Sound):
    def shape_key(self, state: State) -> Any:
        return [1]


class Raises(Sound):
    def begin_epoch(self, number: int) -> None:
        raise ZeroDivisionError("no epochs")


BROKEN: list[tuple[type[Sound], str, str]] = [
    (WrongShape, "shapes", r"'hidden' of the state has the shape \(6, 3\) for 3 texts"),
    (NotNormalised, "probabilities", "probabilities add up to 1.105"),
    (OtherNll, "probabilities", "head.nll is not minus the log_probs"),
    (NllInHalf, "probabilities", "head.nll gives torch.float64"),
    (InPlace, "state is a value", "changed 'hidden' of the state"),
    (Hidden, "nothing hidden", "after another text was read"),
    (Counts, "nothing hidden", "changed the buffer 'blocks'"),
    (Forgets, "state matters", "the same after two different texts"),
    (ByPlace, "rows commute", r"rows \[2\] of a batch"),
    (MixesRows, "rows apart", "when the other texts of the batch did"),
    (SeesFuture, "no future", "when tokens after them did"),
    (ZerosAreNotTheBeginning, "zeros begin", "is not the beginning of a text"),
    (ByBlock, "blocks alike", "in blocks of"),
    (OtherDecoding, "decoding alike", "decoding_state gave something else at token 0"),
    (OtherLongDecoding, "decoder alike", "Decoder gave something else at token 1"),
    (LosesLabel, "flat form", "flattened and unflattened gave something else"),
    (StoredTwice, "stored once", "'keep.weight' and 'again.weight' are the same weight"),
    (NotStored, "weights are all", "given the same weights gave something else"),
    (Copies, "weights from outside", "functional_call"),
    (Unused, "gradients", "'idle.weight' gets no gradient"),
    (Detaches, "gradients", "carries no gradient"),
    (NotFinite, "gradients", "gradient of 'mix.bias' is not finite"),
    (KeepsHalf, "autocast", "very different"),
    (Penalty, "hooks", "the penalty 'mine' is not one finite number"),
    (Infinite, "hooks", "'mine' of diagnostics is not finite"),
    (Unhashable, "hooks", "the model raised TypeError: unhashable"),
    (Raises, "hooks", "the model raised ZeroDivisionError: no epochs"),
]


def made(kind: Callable[[], Sound], dtype: torch.dtype) -> Sound:
    torch.manual_seed(2)
    return kind().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sound_model_passes_and_stays_as_it_is(dtype: torch.dtype) -> None:
    model = made(Sound, dtype).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    longspan.testing.check_model(model)
    assert model.training
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "rule", "seen"), BROKEN)
def test_a_broken_model_is_told_which_rule(
    kind: type[Sound], rule: str, seen: str, dtype: torch.dtype
) -> None:
    with pytest.raises(ContractError, match=seen) as problem:
        check_model(made(kind, dtype), [rule])
    assert problem.value.rule == rule
    assert isinstance(problem.value, AssertionError)
    assert "Look at " in str(problem.value)
    with pytest.raises(ContractError):  # all rules together find it too
        check_model(made(kind, dtype))


def test_every_rule_can_be_broken() -> None:
    assert {rule for _, rule, _ in BROKEN} == RULES.keys()


def test_declaring_that_blocks_matter_is_enough() -> None:
    model = made(ByBlock, torch.float64)
    model.block_invariant = False
    check_model(model)


def test_branches_that_add_nothing_yet_are_tested_too() -> None:
    model = made(Sound, torch.float64)
    nn.init.zeros_(model.keep.weight)
    check_model(model)


def test_a_model_without_a_state() -> None:
    class Bigram(Sound):
        def initial_state(self, batch_size: int) -> State:
            return State({})

        def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
            return self.keep(torch.tanh(self.mix(self.embedding(tokens_BT)))), state

    check_model(made(Bigram, torch.float64))


def test_what_is_asked_wrongly() -> None:
    with pytest.raises(ValueError, match="there is no rule 'no futur'; did you mean 'no future'"):
        check_model(made(Sound, torch.float64), ["no futur"])
    with pytest.raises(TypeError, match="needs a longspan"):
        check_model(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_neither_pytest_nor_hypothesis_is_needed() -> None:
    check = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "import longspan; longspan.testing.check_model"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
