"""A feed-forward block that reads the token before: single tokens through it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspan.layers.token_shift import ShiftedFeedForward
from longspan.state import State

WIDTH, ROWS = 6, 3


@pytest.fixture
def block() -> ShiftedFeedForward:
    torch.manual_seed(3)
    block = ShiftedFeedForward(WIDTH, 10, dropout=0.0, norm_first=True).double()
    return block.requires_grad_(False)


def after_text(block: ShiftedFeedForward, rows: int = ROWS) -> State:
    h_BTD = torch.randn(rows, 5, WIDTH, dtype=torch.float64)
    return block(h_BTD, block.initial_state(rows))[1]


def test_the_state_holds_half_of_the_last_token(block: ShiftedFeedForward) -> None:
    h_BTD = torch.randn(ROWS, 5, WIDTH, dtype=torch.float64)
    _, state = block(h_BTD, block.initial_state(ROWS))
    assert torch.equal(state.tensor("before"), block.norm(h_BTD)[:, -1:, : WIDTH // 2])


def test_the_other_half_of_the_token_before_is_not_read(block: ShiftedFeedForward) -> None:
    h_BTD = torch.randn(1, 2, WIDTH, dtype=torch.float64)
    block.norm = torch.nn.Identity()
    changed_BTD = h_BTD.clone()
    changed_BTD[:, 0, WIDTH // 2 :] += 1
    state = block.initial_state(1)
    assert torch.equal(block(h_BTD, state)[0][:, 1], block(changed_BTD, state)[0][:, 1])
    changed_BTD[:, 0, 0] += 1
    assert not torch.equal(block(h_BTD, state)[0][:, 1], block(changed_BTD, state)[0][:, 1])


def test_steps_are_forward_and_a_text_can_be_replaced(block: ShiftedFeedForward) -> None:
    state, other = after_text(block), after_text(block, 2)
    given, before = state, state.tensor("before").clone()
    step = block.step_from(state)
    address = step._before_1BC.data_ptr()
    assert address != state.tensor("before").data_ptr()

    def check(h_BD: Tensor) -> None:
        nonlocal state
        expected_B1D, state = block(h_BD[:, None], state)
        torch.testing.assert_close(step(h_BD[None])[0], expected_B1D[:, 0], rtol=1e-12, atol=1e-12)

    tokens = torch.randn(6, ROWS, WIDTH, dtype=torch.float64)
    for h_BD in tokens[:3]:
        check(h_BD)
    step.put(1, step.begin(other), 1)
    state = State.join([state.select([0]), other.select([1]), state.select([2])])
    for h_BD in tokens[3:]:
        check(h_BD)
    assert step._before_1BC.data_ptr() == address
    assert torch.equal(given.tensor("before"), before)


def test_a_step_is_as_precise_as_the_weights(block: ShiftedFeedForward) -> None:
    step = block.step_from(after_text(block).to(dtype=torch.float32))
    assert step(torch.randn(1, ROWS, WIDTH, dtype=torch.float64)).dtype == torch.float64
    assert step._before_1BC.dtype == torch.float64
