"""A model of a training step on many GPUs: time of computation and communication, memory of a GPU.

docs/scaling.md has the formulas. `scaling_table.py` applies them to recipes, `scaling_check.py` compares them
with measurements on a CPU. N is the number of GPUs. Sizes are in bytes, times in seconds, bandwidths in bytes
per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

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
    """Of a model, in elements. `matrices` are those that Muon updates: how many, by rows and columns."""

    parameters: int
    num_blocks: int
    blocks: int  # the matrices of all blocks
    largest_block: int
    outside: int  # the matrices outside of blocks: embeddings and output
    matrices: Mapping[tuple[int, int], int]

    @property
    def vectors(self) -> int:
        """What is not sharded."""
        return self.parameters - self.blocks - self.outside


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


def fsdp(compute: float, sizes: Sizes, n: int, network: Network, *, micro_batches: int = 1) -> Step:
    """Matrices are gathered in float32 for the forward and again for the backward pass, block by block.

    Those outside of blocks stay in between. The gradients of the last micro-batch are reduce-scattered, also
    block by block. Vectors are averaged after the backward pass, in one piece.
    """
    outside = gather(FLOAT32 * sizes.outside, n, network)
    block = gather(FLOAT32 * sizes.blocks / sizes.num_blocks, n, network)
    blocks = sizes.num_blocks * block
    vectors = all_reduce(FLOAT32 * sizes.vectors, n, network)
    forward = exposed(outside + blocks, compute / 3 / micro_batches, least=outside + block)
    backward = exposed(micro_batches * blocks + blocks + outside, 2 / 3 * compute, least=outside)
    communication = micro_batches * (outside + 2 * blocks) + blocks + outside + vectors
    return Step(compute, communication, micro_batches * forward + backward + vectors)


def muon_flops(matrices: Mapping[tuple[int, int], int], n: int = 1) -> float:
    """Of the GPU with the most matrices. With r <= c, a step of Newton-Schulz needs 4 r²c + 2 r³."""
    return sum(
        math.ceil(count / n) * NEWTON_SCHULZ_STEPS * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3)
        for shape, count in matrices.items()
    )


def muon_gather(
    matrices: Mapping[tuple[int, int], int], n: int, network: Network, element: int = BF16
) -> float:
    """Every GPU gets all orthogonalised matrices. Each sends equally many: some of them are zeros."""
    return sum(
        gather(element * n * math.ceil(count / n) * rows * columns, n, network)
        for (rows, columns), count in matrices.items()
    )


def muon_exchange(
    matrices: Mapping[tuple[int, int], int], n: int, network: Network, element: int = BF16
) -> float:
    """Of sharded matrices: their rows to the GPU that orthogonalises them, and back."""
    return sum(
        2 * all_to_all(element * n * math.ceil(count / n) * math.ceil(rows / n) * columns, n, network)
        for (rows, columns), count in matrices.items()
    )


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    carried_state: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def memory(
    sizes: Sizes,
    n: int,
    *,
    optimizer_copies: float,
    activations: float,
    state: float,
    lanes: int,
    micro_batches: int = 1,
    sharded: bool = False,
) -> Memory:
    """`activations` and `state` are those of one lane; `lanes` are those of one GPU.

    Sharded, a GPU has 1/N of the matrices, and all of those outside of blocks and of two blocks while they
    are computed. The carried state is there twice, before and after the block of tokens.
    """
    divided = sizes.blocks + sizes.outside
    held = divided / n + sizes.vectors if sharded else float(sizes.parameters)
    gathered = sizes.outside + 2 * sizes.largest_block if sharded else 0
    return Memory(
        weights=FLOAT32 * (held + gathered),
        gradients=FLOAT32 * (held + gathered),
        optimizer=FLOAT32 * optimizer_copies * held,
        activations=activations * math.ceil(lanes / micro_batches),
        carried_state=2 * state * lanes,
    )
