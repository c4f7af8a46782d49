"""Single tokens through blocks whose state has a fixed shape: exactly `forward`, in buffers that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from longspan.layers.block import Block, KeptStep, RowStep
from longspan.layers.short_convolution import ShortConvolution
from longspan.state import State

from .test_contract import copies, equal, make, random_tokens, warm_state
from .test_decoder import off_a_cpu

WIDTH, ROWS = 16, 3
BLOCKS = {f"convolution of {n}": partial(ShortConvolution, WIDTH, n) for n in (2, 4)}
each_block = pytest.mark.parametrize("new", BLOCKS.values(), ids=list(BLOCKS))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def lively(new: Callable[[], Block], dtype: torch.dtype = torch.float32) -> Block:
    torch.manual_seed(3)
    block = new().to(dtype)
    for parameter in block.parameters():
        parameter.normal_()
    return block


def after_text(block: Block, rows: int = ROWS) -> State:
    """The state after some tokens, different in every row."""
    h_BTD = torch.randn(rows, 5, WIDTH).to(next(block.parameters()).dtype)
    return block(h_BTD, block.initial_state(rows))[1]


def kept(block: Block, state: State) -> KeptStep:
    step = block.step_from(state)
    assert isinstance(step, KeptStep)
    return step


def buffers(step: KeptStep) -> list[int]:
    return [leaf.data_ptr() for leaf in step._kept.flatten().values()]


@each_block
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_is_forward_token_by_token(new: Callable[[], Block], mode: Callable) -> None:
    block = lively(new)
    state = after_text(block)
    before = copies(state)
    with mode():
        step = kept(block, state)
        addresses, carried = buffers(step), state
        assert state.tensor("before").data_ptr() not in addresses
        for h_BD in torch.randn(6, ROWS, WIDTH):
            expected_B1D, carried = block(h_BD[:, None], carried)
            assert torch.equal(step(h_BD[None])[0], expected_B1D[:, 0])
            assert buffers(step) == addresses
            assert equal(step._kept, carried)
    assert equal(state, before)


@each_block
def test_one_text_is_replaced_while_the_others_go_on(new: Callable[[], Block]) -> None:
    block = lively(new)
    state, other, tokens = after_text(block), after_text(block, 2), torch.randn(6, ROWS, WIDTH)
    step = kept(block, state)
    addresses = buffers(step)
    for h_BD in tokens[:2]:
        step(h_BD[None])
        _, state = block(h_BD[:, None], state)
    begun = step.begin(other)
    assert not set(buffers(begun)) & set(addresses)
    step.put(1, begun, 1)
    state = State.join([state.select([0]), other.select([1]), state.select([2])])
    for h_BD in tokens[2:]:
        expected_B1D, state = block(h_BD[:, None], state)
        assert torch.equal(step(h_BD[None])[0], expected_B1D[:, 0])
    assert buffers(step) == addresses
    assert equal(begun._kept, other)


@each_block
@pytest.mark.parametrize(
    ("read_in", "decoded_in"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["text in bf16", "tokens in bf16"],
)
def test_it_is_as_precise_as_what_is_read_next(
    new: Callable[[], Block], read_in: torch.dtype, decoded_in: torch.dtype
) -> None:
    block = lively(new, decoded_in)
    state = after_text(block).to(dtype=read_in)
    step = kept(block, state)
    for h_BD in torch.randn(6, ROWS, WIDTH).to(decoded_in):
        expected_B1D, state = block(h_BD[:, None], state)
        found_1BD = step(h_BD[None])
        assert found_1BD.dtype == decoded_in
        assert torch.equal(found_1BD[0], expected_B1D[:, 0])


@each_block
def test_it_needs_no_cpu(new: Callable[[], Block]) -> None:
    block = new().to("meta")
    step = kept(block, block.initial_state(ROWS))
    assert step(torch.empty(1, ROWS, WIDTH, device="meta")).shape == (1, ROWS, WIDTH)


@pytest.mark.parametrize("variant", ["modern, every part", "modern, convolution"])
def test_a_model_with_them_has_a_step_off_a_cpu(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    off_a_cpu(monkeypatch)
    model = make(variant)
    state, tokens = warm_state(model, ROWS), random_tokens(ROWS, 4)
    step = model.step_from(state)
    assert isinstance(step, RowStep)
    found: list[Tensor] = [step(tokens_B1.t())[0] for tokens_B1 in tokens.split(1, dim=1)]
    expected_BTD, _ = model(tokens, state)
    torch.testing.assert_close(torch.stack(found, dim=1), expected_BTD, rtol=1e-8, atol=1e-9)
