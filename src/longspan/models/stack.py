"""A model as a stack: embedding, blocks, head. Shapes: B batch, T block, D width."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from longspan.layers.block import Block, RowStep, Step, checked
from longspan.layers.dropout import Dropout
from longspan.layers.dropout import dropout as drop
from longspan.layers.embeddings import AdaptiveEmbedding
from longspan.layers.input_layer import InputLayer
from longspan.layers.projections import product_dtype
from longspan.layers.residual_stream import ResidualStream
from longspan.layers.token_rows import token_rows
from longspan.models.interface import LanguageModel
from longspan.output import OutputHead
from longspan.state import State

AroundBlock: TypeAlias = "Callable[..., Any]"
"""Calls a block with its inputs (h_BTD, its state, what else it reads) and returns what it returns."""


Values: TypeAlias = "Mapping[str, tuple[Tensor]]"
"""What blocks add to their values, by the name of the block."""
NO_VALUES: Values = {}


class Stack(LanguageModel):
    """embedding -> block, block, block ... -> head.

    `shared` modules are used by several blocks and owned by the stack. `dropout` acts on the embeddings and
    on the input of the head. `inputs` are further layers that read the tokens; their outputs are added to the
    embedding. Their names are used in the state and in checkpoints. `values` are further embeddings of the
    tokens, by the number of the attention block that adds them to its values. `residual` are the weights of
    the residual stream.

    `around_block`, if set, calls the blocks in passes with gradients: see `activation_checkpointing.py`.
    """

    around_block: AroundBlock | None = None

    def __init__(
        self,
        embedding: nn.Embedding | AdaptiveEmbedding,
        blocks: Sequence[Block],
        head: OutputHead,
        *,
        shared: Mapping[str, nn.Module] | None = None,
        final_norm: nn.Module | None = None,
        dropout: Dropout = 0.0,
        inputs: Mapping[str, InputLayer] | None = None,
        values: Mapping[int, nn.Embedding] | None = None,
        residual: ResidualStream | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self._inputs = tuple(inputs or ())
        for name, layer in (inputs or {}).items():
            self.add_module(name, layer)
        self.blocks = nn.ModuleList(blocks)
        self.shared = nn.ModuleDict(shared)
        self.values = nn.ModuleDict({str(block): table for block, table in (values or {}).items()})
        self.residual = residual
        self.final_norm = final_norm
        self.head = head
        self.dropout = dropout
        self._drop = drop
        self.vocabulary_size = embedding.num_embeddings

    def initial_state(self, batch_size: int) -> State:
        begun = {name: layer.initial_state(batch_size) for name, layer in self.input_layers().items()}
        return State(begun | {"blocks": self._each_block(lambda block, _: block.initial_state(batch_size))})

    def input_layers(self) -> dict[str, InputLayer]:
        """The layers that read the tokens besides the embedding, by name."""
        layers = ((name, getattr(self, name)) for name in self._inputs)
        return {name: layer for name, layer in layers if isinstance(layer, InputLayer)}

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        h_BTD, read = self._embedded(tokens_BT, state)
        h_BTD = self._drop(h_BTD, self.dropout, self.training)
        h_BTD, after = self._through(h_BTD, state.branch("blocks"), self._values(tokens_BT))
        if self.final_norm is not None:
            h_BTD = self.final_norm(h_BTD)
        return self._drop(h_BTD, self.dropout, self.training), State(read | {"blocks": after})

    def _through(self, h_BTD: Tensor, states: State, values: Values = NO_VALUES) -> tuple[Tensor, State]:
        """Run all blocks in order."""
        stream = None if self.residual is None else self.residual.begin()
        after: dict[str, State | Tensor] = {}
        around = self.around_block if self.training and torch.is_grad_enabled() else None
        for number, (name, block) in enumerate(self.blocks.named_children()):
            more: tuple[Any, ...] = values.get(name, ())
            if stream is not None:
                h_BTD, blend = stream.before(number, h_BTD)
                more = more if blend is None else (*(more or (None,)), blend)
            inputs = (h_BTD, states.branch(name), *more)
            result = block(*inputs) if around is None else around(block, *inputs)
            h_BTD, after[name] = checked(result, block, name, h_BTD)
        return h_BTD, State(after)

    def _values(self, tokens: Tensor) -> Values:
        """What blocks add to their values: for every block that has a table, its rows."""
        return {
            name: (token_rows(tokens, table.weight.to(product_dtype(table.weight))),)
            for name, table in self.values.named_children()
            if isinstance(table, nn.Embedding)
        }

    def _embedded(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, dict[str, State]]:
        """The input of the first block, and the new states of the input layers."""
        e_BTD: Tensor = self.embedding(tokens_BT)
        read: dict[str, State] = {}
        for name, layer in self.input_layers().items():
            more_BTD, read[name] = layer(tokens_BT, state.branch(name))
            e_BTD = e_BTD + more_BTD
        return e_BTD, read

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile every block on its own, and the final norm: blocks of the same kind share compiled code.

        Copy a model before compiling it: a copy of a compiled model would use the original's weights.
        """
        for block in self.blocks:
            assert isinstance(block, Block)
            block.compile_parts()
        if self.final_norm is not None:
            # Not `.compile()`, which does not compile torch's own modules.
            self.final_norm.forward = torch.compile(self.final_norm.forward)
        if self.dropout != 0:
            self._drop = torch.compile(drop)
        for layer in self.input_layers().values():
            layer.compile_parts()
        if self.residual is not None:
            self.residual.compile_parts()

    def decoding_state(self, state: State) -> State:
        blocks = state.branch("blocks")
        prepared = self._each_block(lambda block, name: block.decoding_state(blocks.branch(name)))
        return State({**state, "blocks": prepared})

    def step_from(self, state: State) -> Step | None:
        blocks = state.branch("blocks")
        named = ((name, block) for name, block in self.blocks.named_children() if isinstance(block, Block))
        steps: list[Step] = []
        for name, block in named:
            through = block.step_from(blocks.branch(name))
            if through is None:
                return None
            steps.append(through)
        step = _StackStep(self, steps, state)
        return step if all(isinstance(through, RowStep) for through in steps) else step.__call__

    def shape_key(self, state: State) -> Hashable | None:
        return tuple(block.shape_key() for block in self.blocks if isinstance(block, Block))

    def _each_block(self, make: Callable[[Block, str], State]) -> State:
        named = ((name, block) for name, block in self.blocks.named_children() if isinstance(block, Block))
        return State({name: make(block, name) for name, block in named})


class _StackStep(RowStep):
    """Single tokens through a stack: the step of every block, and the state of the input layers."""

    def __init__(self, stack: Stack, steps: Sequence[Step], state: State) -> None:
        self._stack, self._steps = stack, steps
        self._kept = State({name: part for name, part in state.items() if name != "blocks"}).map(torch.clone)

    def __call__(self, tokens_1B: Tensor, *more: Tensor) -> Tensor:
        h_B1D, read = self._stack._embedded(tokens_1B.transpose(0, 1), self._kept)
        after = State(read).flatten()
        for name, leaf in self._kept.flatten().items():
            leaf.copy_(after[name])
        h_1BD, values = h_B1D.transpose(0, 1), self._stack._values(tokens_1B)
        stream = None if self._stack.residual is None else self._stack.residual.begin()
        names = (name for name, _ in self._stack.blocks.named_children())
        for number, (name, through) in enumerate(zip(names, self._steps, strict=True)):
            if stream is not None:
                h_1BD, blend = stream.before(number, h_1BD)
                h_1BD = h_1BD if blend is None else blend.of(h_1BD)
            h_1BD = through(h_1BD, *values.get(name, ()))
        norm = self._stack.final_norm
        return h_1BD if norm is None else norm(h_1BD)

    def begin(self, state: State) -> _StackStep:
        blocks = state.branch("blocks")
        named = zip(self._stack.blocks.named_children(), self._steps, strict=True)
        return _StackStep(
            self._stack, [_rows(step).begin(blocks.branch(name)) for (name, _), step in named], state
        )

    def put(self, row: int, source: Any, source_row: int = 0) -> None:
        assert isinstance(source, _StackStep)
        for own, other in zip(self._steps, source._steps, strict=True):
            _rows(own).put(row, other, source_row)
        others = source._kept.flatten()
        for name, leaf in self._kept.flatten().items():
            leaf[row] = others[name][source_row]


def _rows(step: Step) -> RowStep:
    assert isinstance(step, RowStep)
    return step
