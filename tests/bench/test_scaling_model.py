"""The arithmetic of benchmarks/scaling_model.py, term by term."""

from __future__ import annotations

import pytest

from longspan.config import RunConfig, schema
from longspan.optim import build_optimizers
from scaling_model import (
    BUCKET,
    Network,
    Sizes,
    all_reduce,
    all_to_all,
    ddp,
    exposed,
    fsdp,
    gather,
    memory,
    muon_exchange,
    muon_flops,
    muon_gather,
)
from scaling_table import build, sizes_of

# One byte is one second in a node, half a second between nodes; no latency.
NETWORK = Network(gpus_per_node=4, in_node=1.0, between_nodes=0.5, latency=0.0)
SIZES = Sizes(parameters=130, num_blocks=4, blocks=80, largest_block=20, outside=40, matrices={})


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    assert [NETWORK.ring(n) for n in (2, 4, 5, 64)] == [1.0, 1.0, 0.5, 0.5]
    assert Network(4, in_node=1.0, between_nodes=3.0, latency=0.0).ring(64) == 1.0


def test_collectives() -> None:
    assert gather(100.0, 1, NETWORK) == all_reduce(100.0, 1, NETWORK) == all_to_all(100.0, 1, NETWORK) == 0.0
    assert gather(100.0, 4, NETWORK) == pytest.approx(75.0)
    assert all_reduce(100.0, 4, NETWORK) == pytest.approx(150.0)
    assert gather(100.0, 8, NETWORK) == pytest.approx(100 * 7 / 8 / 0.5)
    late = Network(4, 1.0, 0.5, latency=10.0)
    assert gather(100.0, 4, late) == pytest.approx(75.0 + 2 * 10)
    assert all_reduce(100.0, 8, late) == pytest.approx(2 * (175.0 + 3 * 10))


def test_all_to_all_shares_the_cards_of_a_node() -> None:
    assert all_to_all(100.0, 4, NETWORK) == pytest.approx(75.0)
    # Half of the data leaves the node, at an eighth of a byte per second for each of its four GPUs.
    assert all_to_all(100.0, 8, NETWORK) == pytest.approx(50.0 / (0.5 / 4))


def test_what_is_hidden() -> None:
    assert exposed(10.0, behind=4.0, least=1.0) == 6.0
    assert exposed(10.0, behind=40.0, least=1.0) == 1.0


def test_ddp() -> None:
    seconds = 2 * 3 / 4 * 4 * SIZES.parameters
    captured = ddp(600.0, SIZES, 4, NETWORK, captured=True)
    assert (captured.communication, captured.exposed) == pytest.approx((seconds, seconds))
    assert captured.total == pytest.approx(600.0 + seconds)
    many = Sizes(parameters=BUCKET, num_blocks=1, blocks=0, largest_block=0, outside=0, matrices={})
    piece = all_reduce(BUCKET, 4, NETWORK)  # one of four buckets
    overlapping = ddp(3 * piece, many, 4, NETWORK, captured=False)
    assert overlapping.communication == pytest.approx(4 * piece)
    assert overlapping.exposed == pytest.approx(4 * piece - 2 * piece)
    assert ddp(30 * piece, many, 4, NETWORK, captured=False).exposed == pytest.approx(piece)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_fsdp_gathers_twice_and_scatters_once(micro_batches: int) -> None:
    blocks, outside, vectors = (3 / 4 * 4 * number for number in (80, 40, 10))
    step = fsdp(0.0, SIZES, 4, NETWORK, micro_batches=micro_batches)
    expected = micro_batches * (outside + 2 * blocks) + blocks + outside + 2 * vectors
    assert step.communication == step.exposed == pytest.approx(expected)
    hidden = fsdp(1e9, SIZES, 4, NETWORK, micro_batches=micro_batches)
    assert hidden.exposed == pytest.approx(micro_batches * (outside + blocks / 4) + outside + 2 * vectors)


def test_muon() -> None:
    matrices = {(2, 3): 5, (4, 2): 1}
    one = 5 * (4 * 2 * 2 * 3 + 2 * 2**3)
    other = 5 * (4 * 2 * 2 * 4 + 2 * 2**3)
    assert muon_flops(matrices) == 5 * one + other
    assert muon_flops(matrices, 4) == 2 * one + other
    # Filled up to 8 and to 4 matrices.
    assert muon_gather(matrices, 4, NETWORK) == pytest.approx(3 / 4 * 2 * (8 * 6 + 4 * 8))
    # Of 8 matrices a row each (2 rows over 4 GPUs), of 4 matrices a row each; there and back.
    assert muon_exchange(matrices, 4, NETWORK) == pytest.approx(2 * 3 / 4 * 2 * (8 * 3 + 4 * 2))


def test_memory() -> None:
    whole = memory(SIZES, 8, optimizer_copies=2, activations=7.0, state=3.0, lanes=5, micro_batches=2)
    assert (whole.weights, whole.gradients, whole.optimizer) == (520, 520, 1040)
    assert (whole.activations, whole.carried_state) == (21.0, 30.0)
    assert whole.total == 520 + 520 + 1040 + 21 + 30
    sharded = memory(SIZES, 8, optimizer_copies=2, activations=7.0, state=3.0, lanes=5, sharded=True)
    held, gathered = 120 / 8 + 10, 40 + 2 * 20
    assert (sharded.weights, sharded.optimizer) == (4 * (held + gathered), 4 * 2 * held)


def test_sizes_of_a_model() -> None:
    model = {"architecture": "modern", "num_layers": 2, "width": 16, "num_heads": 2, "inner_width": 48}
    stage = {"steps": 1, "learning_rate": 0.1, "optimizer": "muon"}
    config = schema.read(RunConfig, {"name": "small", "model": model, "stage": [stage]})
    built = build(config)
    sizes = sizes_of(built, build_optimizers(built, config.stage[0]))
    assert sizes.parameters == sum(p.numel() for p in built.parameters())
    assert sizes.matrices[48, 16] == sizes.matrices[16, 48] == 2
    assert sizes.blocks == sum(rows * columns * n for (rows, columns), n in sizes.matrices.items())
    assert (sizes.num_blocks, sizes.vectors) == (
        len(built.blocks),
        sum(p.numel() for p in built.parameters() if p.ndim < 2),
    )
