"""A model as a stack: embedding, blocks, head. Shapes: B batch, T block, D width."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan.layers.block import Block, Step
from longspan.layers.dropout import GrowingDropout
from longspan.layers.dropout import dropout as drop
from longspan.layers.embeddings import AdaptiveEmbedding
from longspan.layers.ngrams import NgramEmbeddings
from longspan.layers.span import LearnedSpan, clamp_and_read, span_penalty
from longspan.models.interface import LanguageModel
from longspan.output import OutputHead
from longspan.state import State


class Stack(LanguageModel):
    """embedding -> block, block, block ... -> head.

    `shared` modules are used by several blocks and owned by the stack. `dropout` acts on the embeddings and
    on what the head gets. `ngrams` add to the embeddings what tokens mean together. Learned spans, wherever
    they are in the blocks, report their penalty and sizes through the hooks of the interface.
    """

    def __init__(
        self,
        embedding: nn.Embedding | AdaptiveEmbedding,
        blocks: Sequence[Block],
        head: OutputHead,
        *,
        shared: Mapping[str, nn.Module] | None = None,
        final_norm: nn.Module | None = None,
        dropout: float | GrowingDropout = 0.0,
        ngrams: NgramEmbeddings | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.ngrams = ngrams
        self.blocks = nn.ModuleList(blocks)
        self.shared = nn.ModuleDict(shared)
        self.final_norm = final_norm
        self.head = head
        self.dropout = dropout
        self._drop = drop
        self.vocabulary_size = embedding.num_embeddings
        self.register_load_state_dict_post_hook(_refresh_after_loading)  # type: ignore[no-untyped-call]

    def initial_state(self, batch_size: int) -> State:
        begun = {} if self.ngrams is None else {"ngrams": self.ngrams.initial_state(batch_size)}
        return State(begun | {"blocks": self._each_block(lambda block, _: block.initial_state(batch_size))})

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        h_BTD, read = self._embedded(tokens_BT, state)
        h_BTD = self._drop(h_BTD, self.dropout, self.training)
        h_BTD, after = self._through(h_BTD, state.branch("blocks"))
        if self.final_norm is not None:
            h_BTD = self.final_norm(h_BTD)
        return self._drop(h_BTD, self.dropout, self.training), State(read | {"blocks": after})

    def _through(self, h_BTD: Tensor, states: State) -> tuple[Tensor, State]:
        """All blocks, one after the other."""
        after: dict[str, State | Tensor] = {}
        for name, block in self.blocks.named_children():
            h_BTD, after[name] = block(h_BTD, states.branch(name))
        return h_BTD, State(after)

    def _embedded(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, dict[str, State]]:
        """What the blocks get, and what is remembered of the tokens themselves."""
        e_BTD: Tensor = self.embedding(tokens_BT)
        if self.ngrams is None:
            return e_BTD, {}
        together_BTD, read = self.ngrams(tokens_BT, state.branch("ngrams"))
        return e_BTD + together_BTD, {"ngrams": read}

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile every block on its own, and the last norm: blocks of a kind share their code.

        A copy of a compiled model would go on using the original's weights: copy first.
        """
        for block in self.blocks:
            assert isinstance(block, Block)
            block.compile_parts()
        if self.final_norm is not None:
            # Not `.compile()`, which leaves torch's own modules as they are.
            self.final_norm.forward = torch.compile(self.final_norm.forward)
        if self.dropout != 0:
            self._drop = torch.compile(drop)
        if self.ngrams is not None:
            self.ngrams.compile_parts()

    def begin_epoch(self, number: int) -> None:
        for module in self.modules():
            if isinstance(module, NgramEmbeddings | GrowingDropout):
                module.begin_epoch(number)

    def decoding_state(self, state: State) -> State:
        blocks = state.branch("blocks")
        prepared = self._each_block(lambda block, name: block.decoding_state(blocks.branch(name)))
        return State({**state, "blocks": prepared})

    def step_from(self, state: State) -> Step | None:
        """`forward` for single tokens, tokens_1B -> hidden_1BD; see `Block.step_from`."""
        blocks = state.branch("blocks")
        named = ((name, block) for name, block in self.blocks.named_children() if isinstance(block, Block))
        steps: list[Step] = []
        for name, block in named:
            through = block.step_from(blocks.branch(name))
            if through is None:
                return None
            steps.append(through)
        kept = State({name: part for name, part in state.items() if name != "blocks"}).map(torch.clone)

        def step(tokens_1B: Tensor) -> Tensor:
            h_B1D, read = self._embedded(tokens_1B.transpose(0, 1), kept)
            after = State(read).flatten()
            for name, leaf in kept.flatten().items():
                leaf.copy_(after[name])
            h_1BD = h_B1D.transpose(0, 1)
            for through in steps:
                h_1BD = through(h_1BD)
            return h_1BD if self.final_norm is None else self.final_norm(h_1BD)

        return step

    def shape_key(self, state: State) -> Hashable | None:
        return tuple(block.shape_key() for block in self.blocks if isinstance(block, Block))

    def penalties(self) -> dict[str, Tensor]:
        spans = self._learned_spans()
        return {"span": span_penalty(spans)} if spans else {}

    def after_update(self) -> None:
        for span in self._learned_spans():
            span.count_update()
        self.refresh()

    def refresh(self) -> None:
        """Derive from the weights what is derived from them: they were updated, loaded or changed by hand.

        Until then heads look as far as the spans before let them, which for longer ones is not far enough.
        """
        clamp_and_read(self._learned_spans())

    def diagnostics(self) -> dict[str, Tensor]:
        spans = self._learned_spans()
        if not spans:
            return {}
        return {
            "spans_LH": torch.stack([span.sizes_H() for span in spans]),
            "span_limit": torch.tensor(max(span.limit for span in spans)),
        }

    def _learned_spans(self) -> list[LearnedSpan]:
        return [module for module in self.modules() if isinstance(module, LearnedSpan)]

    def _each_block(self, make: Callable[[Block, str], State]) -> State:
        named = ((name, block) for name, block in self.blocks.named_children() if isinstance(block, Block))
        return State({name: make(block, name) for name, block in named})


def _refresh_after_loading(model: nn.Module, _: Any) -> None:
    """Integer sizes are derived from the weights: loaded weights bring new ones."""
    assert isinstance(model, Stack)
    model.refresh()
