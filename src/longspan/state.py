"""The value a model carries from one block of tokens to the next.

A `State` is a tree of tensors. The batch is the first dimension of every tensor, and a row of zeros is the
state of a text that has not begun. So rows can be selected, joined and reset without knowing the model.
A state is never changed in place; every operation returns a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Rows: TypeAlias = "slice | Sequence[int] | Tensor"


class State(Mapping[str, "State | Tensor"]):
    """An immutable tree of tensors with named branches."""

    __slots__ = ("_children",)

    def __init__(self, children: Mapping[str, State | Tensor]) -> None:
        for name in children:
            if not name or "." in name:
                raise ValueError(f"a branch of a state needs a name without dots, not {name!r}")
        self._children = dict(children)

    def __getitem__(self, name: str) -> State | Tensor:
        return self._children[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._children)

    def __len__(self) -> int:
        return len(self._children)

    def __repr__(self) -> str:
        leaves = ", ".join(f"{name}: {tuple(leaf.shape)}" for name, leaf in self.flatten().items())
        return f"State({leaves})"

    def tensor(self, name: str) -> Tensor:
        """The leaf called `name`."""
        leaf = self._children[name]
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name!r} is a branch of this state, not a tensor")
        return leaf

    def branch(self, name: str) -> State:
        """The subtree called `name`; empty if it is absent, since the flat form has no empty subtrees."""
        child = self._children.get(name, State({}))
        if not isinstance(child, State):
            raise TypeError(f"{name!r} is a tensor of this state, not a branch")
        return child

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """The same tree with `function` applied to every tensor."""
        return State(
            {
                name: child.map(function) if isinstance(child, State) else function(child)
                for name, child in self._children.items()
            }
        )

    def detach(self) -> State:
        """The same state without gradient history: no gradient flows back from the next block."""
        return self.map(Tensor.detach)

    def to(self, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None) -> State:
        """The same state on another device or in another precision; integer counters keep their type."""
        return self.map(lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype))

    def select(self, rows: Rows) -> State:
        """The state of some rows of the batch, in the order given."""
        return self.map(lambda leaf: leaf[_index(rows, leaf)])

    def reset(self, rows: Rows) -> State:
        """The same state with some rows reset to the beginning of a text."""

        def begin_again(leaf: Tensor) -> Tensor:
            leaf = leaf.clone()
            leaf[_index(rows, leaf)] = 0
            return leaf

        return self.map(begin_again)

    def flatten(self) -> dict[str, Tensor]:
        """Every tensor under its dotted name, e.g. `blocks.3.memory`; the form used in checkpoints."""
        flat: dict[str, Tensor] = {}
        for name, child in self._children.items():
            if isinstance(child, State):
                flat.update({f"{name}.{below}": leaf for below, leaf in child.flatten().items()})
            else:
                flat[name] = child
        return flat

    @staticmethod
    def unflatten(flat: Mapping[str, Tensor]) -> State:
        """The inverse of `flatten`."""
        children: dict[str, State | Tensor] = {}
        branches: dict[str, dict[str, Tensor]] = {}
        for name, leaf in flat.items():
            first, dot, rest = name.partition(".")
            if dot:
                branches.setdefault(first, {})[rest] = leaf
                children.setdefault(first, State({}))  # keeps the order of first appearance
            else:
                children[first] = leaf
        for name, below in branches.items():
            if name in flat:
                raise ValueError(f"{name!r} cannot be both a tensor and a branch of a state")
            children[name] = State.unflatten(below)
        return State(children)

    @staticmethod
    def join(states: Sequence[State]) -> State:
        """The states of several batches as the state of one batch, rows in the order given.

        All memories must have the same length. States of one model do while its weights are fixed, except a
        GPT's, whose memory grows within its context.
        """
        flats = [state.flatten() for state in states]
        if any(flat.keys() != flats[0].keys() for flat in flats):
            raise ValueError("only states with the same tensors can be joined")
        for name, leaf in flats[0].items():
            if any(flat[name].shape[1:] != leaf.shape[1:] for flat in flats):
                sizes = " and ".join(str(tuple(flat[name].shape)) for flat in flats)
                raise ValueError(
                    f"states with memories of different length cannot be joined: {name} is {sizes}"
                )
        return State.unflatten({name: torch.cat([flat[name] for flat in flats]) for name in flats[0]})


def _index(rows: Rows, leaf: Tensor) -> slice | Tensor:
    if isinstance(rows, slice):
        return rows
    index = torch.as_tensor(rows, device=leaf.device)
    return index if index.numel() else index.long()  # an empty list becomes a float tensor


def _names_and_children(state: State) -> tuple[list[Any], list[str]]:
    return list(state.values()), list(state)


def _keys_and_children(state: State) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[str]]:
    return [(pytree.MappingKey(name), child) for name, child in state.items()], list(state)


# For torch.export, torch.compile and torch.func, which see the tensors; exported programs keep the names.
pytree.register_pytree_node(
    State,
    _names_and_children,
    lambda children, names: State(dict(zip(names, children, strict=True))),
    serialized_type_name="longspan.State",
    flatten_with_keys_fn=_keys_and_children,
)
