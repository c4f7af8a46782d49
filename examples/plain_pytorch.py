"""A learned span in plain PyTorch: the adaptive-span Transformer and its training loop, without recipes.

    python examples/plain_pytorch.py

Heads see only the positions before their own, as far back as they learn. The memory of a layer is a tensor of
its last inputs. Shapes: B batch, T block, M memory, D width, H heads, K head width.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.nn import LearnedDistanceKeys, LearnedSpan, span_attention
from longspan.optim import Adagrad


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int, inner_width: int, span: LearnedSpan) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.span, self.num_heads = span, num_heads
        self.expand, self.contract = nn.Linear(width, inner_width), nn.Linear(inner_width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, h: Tensor, memory: Tensor, position_keys: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, past_k, past_v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, T or M, K]
            for project, x in (
                (self.query, h), (self.key, h), (self.value, h), (self.key, memory), (self.value, memory)
            )
        )  # fmt: skip
        seen = span_attention(
            q, k, v, past=(past_k, past_v), position_keys=position_keys,
            spans=self.span(), ramp=self.span.ramp, window=self.span.windows,
        )  # fmt: skip
        memory = torch.cat([memory, h], dim=1)[:, -self.span.limit :].detach()
        h = self.norm1(h + self.out(seen.transpose(1, 2).flatten(2)))
        return self.norm2(h + self.contract(F.relu(self.expand(h)))), memory


class Model(nn.Module):
    def __init__(
        self, vocabulary: int, width: int, heads: int, inner_width: int, layers: int, limit: int, **span: Any
    ) -> None:
        super().__init__()
        self.position_keys = LearnedDistanceKeys(limit, width // heads)
        self.layers = nn.ModuleList(
            Layer(width, heads, inner_width, LearnedSpan(heads, limit, **span)) for _ in range(layers)
        )
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, memories: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        h, after = self.embedding(tokens), []
        memories = memories or [h[:, :0]] * len(self.layers)  # at first nothing
        for layer, memory in zip(self.layers, memories, strict=True):
            h, memory = layer(h, memory, self.position_keys())
            after.append(memory)
        return self.head(h), after


def train(model: Model, tokens: Tensor, block: int, steps: int, lr: float, clip: float) -> list[float]:
    """`tokens` [B, N] are read block by block; the loss of every step, without the penalty."""
    optimizer, memories, losses = Adagrad(model.parameters(), lr=lr, clip=clip), None, []
    for start in range(0, steps * block, block):
        logits, memories = model(tokens[:, start : start + block], memories)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, start + 1 : start + block + 1].flatten())
        optimizer.zero_grad()
        (loss + sum(layer.span.penalty() for layer in model.layers)).backward()
        optimizer.step()
        for layer in model.layers:
            layer.span.clamp_()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    model = Model(256, 64, heads=4, inner_width=128, layers=2, limit=128, ramp=16, penalty=1e-5)
    losses = train(model, text[: len(text) // 8 * 8].view(8, -1), block=64, steps=60, lr=0.07, clip=0.03)
    print(f"loss {losses[0]:.2f} at first, {sum(losses[-10:]) / 10:.2f} in the last ten steps")
    for number, layer in enumerate(model.layers):
        print(f"layer {number}: spans of {', '.join(f'{span:.0f}' for span in layer.span())} tokens")
