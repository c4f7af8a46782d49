"""A block, and a model made of it, that are no part of Longspan: the gated linear recurrence.

Every channel of a memory m forgets at its own pace, and the pace depends on the input x = LN(h):

    a_t = sigmoid(W_a x_t + b_a),    v_t = W_v x_t + b_v,    g_t = silu(W_g x_t + b_g)
    m_t = a_t * m_(t-1) + (1 - a_t) * v_t
    out_t = h_t + W_o (m_t * g_t)

Importing this module registers the architecture `gated`, and the letter `g` for patterns and searches; see
docs/extending.md. Shapes: B batch, T block, D width, M memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan import Block, Stack, State, option, register_architecture, register_block, section
from longspan.layers.feed_forward import FeedForward
from longspan.output import SoftmaxHead


@dataclass(frozen=True, kw_only=True)
class RecurrenceConfig:
    """The table [model.recurrence] of `gated`, and [model.blocks.g] of other architectures."""

    expand: int = option(1, help="channels of the memory, as a multiple of the width")
    slowest: float = option(100.0, help="tokens in which the slowest channels forget a half, at first")

    def __post_init__(self) -> None:
        if self.expand < 1 or not self.slowest >= 1.0:
            raise ValueError("expand and slowest must be at least 1")


@dataclass(frozen=True, kw_only=True)
class GatedConfig:
    """The table [model] of `gated`."""

    num_layers: int = option(4, help="layers, each a recurrence followed by feed-forward")
    width: int = option(256, help="size of the hidden states")
    recurrence: RecurrenceConfig = section(RecurrenceConfig, help="the recurrence of every layer")


class GatedRecurrence(Block):
    def __init__(self, width: int, config: RecurrenceConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gates = nn.Linear(width, 3 * config.expand * width)
        self.out = nn.Linear(config.expand * width, width, bias=False)
        half_lives_M = torch.logspace(0, 1, config.expand * width, base=config.slowest)
        with torch.no_grad():  # a^half_life = 1/2
            self.gates.bias[: config.expand * width] = torch.logit(0.5 ** (1 / half_lives_M))

    def initial_state(self, batch_size: int) -> State:
        return State({"memory": self.norm.weight.new_zeros(batch_size, self.out.in_features)})

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        forget_BTM, value_BTM, gate_BTM = self.gates(self.norm(h_BTD)).chunk(3, dim=-1)
        a_BTM = forget_BTM.sigmoid()
        decay_BTM, new_BTM = scan(a_BTM, (1 - a_BTM) * value_BTM)
        memory_BTM = decay_BTM * state.tensor("memory")[:, None] + new_BTM
        return h_BTD + self.out(memory_BTM * F.silu(gate_BTM)), State({"memory": memory_BTM[:, -1]})


def scan(a_BTM: Tensor, b_BTM: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of m_t = A_t m_0 + B_t, where m_t = a_t m_(t-1) + b_t; every turn spans twice as many steps."""
    reach = 1
    while reach < a_BTM.shape[1]:
        b_BTM = b_BTM + a_BTM * F.pad(b_BTM[:, :-reach], (0, 0, reach, 0))
        a_BTM = a_BTM * F.pad(a_BTM[:, :-reach], (0, 0, reach, 0), value=1.0)
        reach *= 2
    return a_BTM, b_BTM


def gated(config: GatedConfig, vocabulary_size: int) -> Stack:
    blocks: list[Block] = []
    for _ in range(config.num_layers):
        blocks.append(GatedRecurrence(config.width, config.recurrence))
        blocks.append(FeedForward(config.width, 4 * config.width, dropout=0.0, norm_first=True))
    embedding, head = nn.Embedding(vocabulary_size, config.width), SoftmaxHead(config.width, vocabulary_size)
    return Stack(embedding, blocks, head, final_norm=nn.LayerNorm(config.width))


register_architecture("gated", GatedConfig, gated)
register_block("g", "gated recurrence", lambda of, own: GatedRecurrence(of.width, own), RecurrenceConfig)
