"""A model of a training step on many GPUs: time of computation and communication.

    python benchmarks/scaling_model.py --steps FILE [--json FILE]

prints the tables of docs/scaling.md, which explains the formulas. FILE has the time of steps on one GPU, as
`benchmarks/large_steps.py` writes it. Everything about the network is an assumption: see `NETWORKS`.

N is the number of GPUs. Sizes are in bytes, times in seconds, bandwidths in bytes per second.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FLOAT32, BF16 = 4, 2
BUCKET = 25 * 2**20  # of DDP
NEWTON_SCHULZ_STEPS = 5  # of Muon


@dataclass(frozen=True)
class Network:
    """`in_node` is what one GPU sends and receives in its node, `between_nodes` what one whole node does.

    `latency` is that of one message.
    """

    gpus_per_node: int
    in_node: float
    between_nodes: float
    latency: float

    def ring(self, n: int) -> float:
        """The bandwidth of a ring through all GPUs. One of its links per node leaves the node.

        NCCL makes as many rings as there are network cards, so that link has the bandwidth of all of them.
        """
        return self.in_node if n <= self.gpus_per_node else min(self.in_node, self.between_nodes)


def gather(size: float, n: int, network: Network) -> float:
    """An all-gather to tensors of `size` on every GPU, or a reduce-scatter from them."""
    if n == 1:
        return 0.0
    return (n - 1) / n * size / network.ring(n) + network.latency * math.ceil(math.log2(n))


def all_reduce(size: float, n: int, network: Network) -> float:
    """A reduce-scatter and an all-gather."""
    return 2 * gather(size, n, network)


def all_to_all(size: float, n: int, network: Network) -> float:
    """Every GPU divides a tensor of `size` over all of them. GPUs of a node share its network cards."""
    if n == 1:
        return 0.0
    node = min(n, network.gpus_per_node)
    inside = (node - 1) / n * size / network.in_node
    outside = (n - node) / n * size * network.gpus_per_node / network.between_nodes
    return max(inside, outside) + network.latency * math.ceil(math.log2(n))


def exposed(communication: float, behind: float, least: float) -> float:
    """What is not hidden behind a computation of `behind` seconds; at least the last piece, `least`."""
    return max(least, communication - behind)


@dataclass(frozen=True)
class Sizes:
    """What is communicated of a model. `matrices` are those that Muon updates, by rows and columns."""

    parameters: int
    blocks: int  # elements of the matrices of all blocks
    largest_block: int
    outside: int  # elements of the matrices outside of blocks: embeddings and output
    matrices: Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class Step:
    """Seconds of one step on every one of N GPUs."""

    compute: float
    communication: float  # as if nothing overlapped
    exposed: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed


def ddp(compute: float, sizes: Sizes, n: int, network: Network, *, captured: bool) -> Step:
    """Gradients are averaged in float32.

    After a captured step they are averaged in one piece, and nothing overlaps. Otherwise buckets are averaged
    during the backward pass, two thirds of the computation; the last bucket comes after it.
    """
    size = FLOAT32 * sizes.parameters
    pieces = 1 if captured else math.ceil(size / BUCKET)
    communication = pieces * all_reduce(size / pieces, n, network)
    if captured:
        return Step(compute, communication, communication)
    last = all_reduce(min(size, BUCKET), n, network)
    return Step(compute, communication, exposed(communication, 2 / 3 * compute, last))


def fsdp(
    compute: float, sizes: Sizes, n: int, network: Network, *, num_blocks: int, micro_batches: int = 1
) -> Step:
    """Matrices are gathered in float32 for the forward and again for the backward pass, block by block.

    Those outside of blocks stay in between. The gradients of the last micro-batch are reduce-scattered, also
    block by block. Vectors are averaged after the backward pass.
    """
    outside = gather(FLOAT32 * sizes.outside, n, network)
    block = gather(FLOAT32 * sizes.blocks / num_blocks, n, network)
    first_block = gather(FLOAT32 * sizes.largest_block, n, network)
    vectors = all_reduce(FLOAT32 * (sizes.parameters - sizes.blocks - sizes.outside), n, network)
    forward = outside + num_blocks * block
    scatter = outside + num_blocks * block
    backward = num_blocks * block
    communication = micro_batches * (forward + backward) + scatter + vectors
    not_hidden = (
        micro_batches * exposed(forward, compute / 3 / micro_batches, outside + first_block)
        + exposed(micro_batches * backward + scatter, 2 / 3 * compute, outside)
        + vectors
    )
    return Step(compute, communication, not_hidden)


def muon_flops(matrices: Mapping[tuple[int, int], int], n: int = 1) -> float:
    """Of the GPU with the most matrices. With r <= c, a step of Newton-Schulz needs 4 r²c + 2 r³."""
    return sum(
        math.ceil(count / n) * NEWTON_SCHULZ_STEPS * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3)
        for shape, count in matrices.items()
    )


def muon_gather(matrices: Mapping[tuple[int, int], int], n: int, network: Network) -> float:
    """Every GPU gets all orthogonalised matrices, in bf16. Each sends equally many: some are zeros."""
    return sum(
        gather(BF16 * n * math.ceil(count / n) * rows * columns, n, network)
        for (rows, columns), count in matrices.items()
    )


def muon_exchange(matrices: Mapping[tuple[int, int], int], n: int, network: Network) -> float:
    """Of sharded matrices: their rows to the GPU that orthogonalises them, and back, in bf16."""
    return sum(
        2 * all_to_all(BF16 * n * math.ceil(count / n) * math.ceil(rows / n) * columns, n, network)
        for (rows, columns), count in matrices.items()
    )
