"""The carried state: a tree of tensors that nothing changes in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from longspan.state import State

NAMES = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=3)
LEAVES = st.integers(0, 9).map(lambda n: torch.arange(4 * n, dtype=torch.float32).view(4, n))
TREES = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=3).map(State),
    lambda trees: st.dictionaries(NAMES, LEAVES | trees, max_size=3).map(State),
    max_leaves=8,
)


def example() -> State:
    """Four rows of two branches: floats that need gradients, and a counter."""
    memory = torch.arange(24, dtype=torch.float32).view(4, 3, 2).requires_grad_()
    return State({"a": State({"memory": memory, "fill": torch.tensor([1, 2, 3, 4])}), "b": torch.ones(4, 1)})


def same(one: State, other: State) -> bool:
    first, second = one.flatten(), other.flatten()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@settings(max_examples=60, deadline=None)
@given(tree=TREES)
def test_the_flat_form_is_the_whole_state(tree: State) -> None:
    flat = tree.flatten()
    again = State.unflatten(flat)
    assert list(again.flatten()) == list(flat)
    assert all(again.flatten()[name] is leaf for name, leaf in flat.items())


@settings(max_examples=60, deadline=None)
@given(tree=TREES)
def test_torch_sees_every_tensor_and_puts_the_same_tree_together(tree: State) -> None:
    leaves, spec = pytree.tree_flatten(tree)
    flat = tree.flatten()
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in flat.values()]
    assert same(pytree.tree_unflatten(leaves, spec), tree)
    paths, _ = pytree.tree_flatten_with_path(tree)
    assert [".".join(key.key for key in path) for path, _ in paths] == list(flat)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_an_exported_program_takes_and_returns_states() -> None:
    class Counter(nn.Module):
        def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
            fill = state.branch("a").tensor("fill") + x
            return fill.sum(), State({"a": State({"fill": fill})})

    state = State({"a": State({"fill": torch.tensor([1, 2])})})
    program = torch.export.export(Counter(), (torch.tensor(3), state))
    total, after = program.module()(torch.tensor(10), state)
    assert isinstance(after, State)
    assert (int(total), after.flatten()["a.fill"].tolist()) == (23, [11, 12])


def test_branches_and_tensors_are_not_taken_for_each_other() -> None:
    state = example()
    assert state.branch("a").tensor("fill").tolist() == [1, 2, 3, 4]
    assert len(state.branch("absent")) == 0
    with pytest.raises(TypeError, match="'a' is a branch"):
        state.tensor("a")
    with pytest.raises(TypeError, match="'b' is a tensor"):
        state.branch("b")
    assert repr(state) == "State(a.memory: (4, 3, 2), a.fill: (4,), b: (4, 1))"


@pytest.mark.parametrize("name", ["", ".", "a.b"])
def test_names_are_whole_and_have_no_dots(name: str) -> None:
    with pytest.raises(ValueError, match="a name without dots"):
        State({name: torch.zeros(1)})


def test_a_name_is_a_tensor_or_a_branch() -> None:
    flat = {"a.b": torch.zeros(1), "a": torch.zeros(1)}
    for pairs in (flat.items(), reversed(flat.items())):
        with pytest.raises(ValueError, match="'a' cannot be both"):
            State.unflatten(dict(pairs))


def test_a_state_cannot_be_changed() -> None:
    children: dict[str, Any] = {"a": torch.zeros(1)}
    state = State(children)
    children["b"] = torch.zeros(1)
    assert list(state) == ["a"]
    with pytest.raises(TypeError):
        state["a"] = torch.ones(1)  # type: ignore[index]
    with pytest.raises(TypeError):
        del state["a"]  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        state.b = torch.ones(1)  # type: ignore[attr-defined]


def test_no_operation_touches_the_state_it_is_given() -> None:
    state, untouched = example(), example()
    for operation in (
        lambda: state.detach(),
        lambda: state.to(dtype=torch.float64),
        lambda: state.select([3, 0]),
        lambda: state.reset([0, 1]),
        lambda: state.reset(slice(None)),
        lambda: State.join([state, state]),
    ):
        operation()
        assert same(state, untouched)
        assert state.branch("a").tensor("memory").requires_grad


def test_detach_cuts_gradients() -> None:
    assert not any(leaf.requires_grad for leaf in example().detach().flatten().values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_precision_is_for_floats_and_a_device_for_all(dtype: torch.dtype) -> None:
    for device, moved in (
        ("cpu", example().to(dtype=dtype)),
        ("meta", example().to("meta", dtype)),
        ("meta", example().to(device=torch.device("meta"), dtype=dtype)),
    ):
        types = {name: leaf.dtype for name, leaf in moved.flatten().items()}
        assert types == {"a.memory": dtype, "a.fill": torch.int64, "b": dtype}
        assert {leaf.device.type for leaf in moved.flatten().values()} == {device}
    kept = example().to("meta")
    assert [leaf.dtype for leaf in kept.flatten().values()] == [torch.float32, torch.int64, torch.float32]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(1, 3), [1, 2]),
        ([3, 0, 3], [3, 0, 3]),
        ((2,), [2]),
        ([], []),
        (torch.tensor([1, 0]), [1, 0]),
        (torch.tensor([True, False, False, True]), [0, 3]),
    ],
)
def test_rows_are_picked_and_reset_in_every_tensor(rows: Any, expected: list[int]) -> None:
    state = example()
    for name, leaf in state.select(rows).flatten().items():
        assert torch.equal(leaf, state.flatten()[name][torch.tensor(expected, dtype=torch.long)])
    for name, leaf in state.reset(rows).flatten().items():
        before = state.flatten()[name]
        for row in range(4):
            assert torch.equal(leaf[row], torch.zeros_like(before[row]) if row in expected else before[row])


def test_join_puts_selected_rows_together_again() -> None:
    state = example()
    assert same(State.join([state.select([0]), state.select(slice(1, 4))]), state)
    assert same(State.join([state]), state)
    with pytest.raises(ValueError, match="the same tensors"):
        State.join([State({"b": torch.zeros(1, 1)}), State({"b": torch.zeros(1, 1), "c": torch.zeros(1)})])
    with pytest.raises(ValueError, match=r"memories of different length .*: a\.b is \(2, 3\) and \(1, 5\)$"):
        State.join([State({"a": State({"b": torch.zeros(rows, n)})}) for rows, n in ((2, 3), (1, 5))])
