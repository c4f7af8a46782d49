"""How long a block takes on this machine."""

from __future__ import annotations

import statistics
import time

import torch

from longspan.config import RunConfig
from longspan.layers.block import Block
from longspan.models.supernet import Supernet

WARM_UPS, RUNS = 3, 10


def measure_costs(model: Supernet, config: RunConfig) -> None:
    """Where the search counts latency, let every candidate cost the time it takes where the model is now."""
    if config.search is None or config.search.cost != "latency":
        return
    shape = (config.training.batch_size, config.training.block_length, _width(model))
    seconds = {letter: block_seconds(block, shape) for letter, block in model.candidates().items()}
    model.set_costs(seconds)


def block_seconds(block: Block, shape_BTD: tuple[int, int, int]) -> float:
    """Seconds forward and backward for one batch, in float32: the median of several runs.

    Weights, gradients and random numbers stay as they are.
    """
    weights = [parameter for parameter in block.parameters() if parameter.requires_grad]
    if not weights:
        return 0.0  # a block that does nothing: what could be measured is the measuring
    device = weights[0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        h_BTD = torch.randn(shape_BTD, device=device, requires_grad=True)
        state = block.initial_state(shape_BTD[0])
        seconds = []
        for _ in range(WARM_UPS + RUNS):
            start = _now(device)
            out_BTD, _ = block(h_BTD, state)
            torch.autograd.grad(out_BTD.sum(), [h_BTD, *weights], allow_unused=True)
            seconds.append(_now(device) - start)
    return statistics.median(seconds[WARM_UPS:])


def _width(model: Supernet) -> int:
    """Of the hidden states."""
    with torch.no_grad():
        device = next(model.parameters()).device
        return int(model.embedding(torch.zeros(1, 1, dtype=torch.long, device=device)).shape[-1])


def _now(device: torch.device) -> float:
    """The time when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
