"""Warm-up steps that are rolled back: compilation and graph capture are done when the clock starts."""

from __future__ import annotations

import torch

from longspan import distributed
from longspan.config import StageConfig
from longspan.data import LanePosition
from longspan.optim import set_rate
from longspan.state import State
from longspan.training.prefetch import Prefetcher
from longspan.training.step import Updater
from longspan.training.strategy import Strategy


def warm_up_compilation(
    steps: int,
    updater: Updater,
    strategy: Strategy,
    stage: StageConfig,
    blocks: Prefetcher,
    position: LanePosition,
    state: State,
) -> None:
    """Run the next steps with separate optimizers, then restore weights, loss scale and random generators.

    The learning rate is 0: spans, and with them shapes, stay as the first steps will need them.
    """
    model, device = updater.model, updater.device
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scale = updater.scaler.state_dict()
    optimizers = strategy.optimizers_of(stage)
    set_rate(optimizers, 0.0)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(steps):
            block = blocks.next(position)
            if block is None:
                break
            if block.begins:
                state = distributed.initial_state(model, block.tokens_BT.shape[0])
            _, state = updater.update(
                block.tokens_BT,
                block.targets_BT,
                state,
                optimizers,
                stage.clip_norm,
                multi_token=stage.multi_token,
            )
            position = block.position
    updater.scaler.load_state_dict(scale)
    model.load_state_dict(weights)
