"""Warm-up steps that are rolled back: compilation and graph capture are done when the clock starts."""

from __future__ import annotations

import torch

from longspan import distributed
from longspan.config import StageConfig
from longspan.data import LanePosition, TokenBlock
from longspan.models import LanguageModel
from longspan.optim import set_rate
from longspan.state import State
from longspan.training.prefetch import Prefetcher
from longspan.training.step import Updater
from longspan.training.strategy import Strategy

PROBES = 64
"""At how many fractions of the training a model is asked whether it has other shapes there."""


def warm_up_compilation(
    steps: int,
    updater: Updater,
    strategy: Strategy,
    stage: StageConfig,
    blocks: Prefetcher,
    position: LanePosition,
    state: State,
    done: float = 0.0,
) -> None:
    """Run the next steps with separate optimizers, then restore weights, loss scale and random generators.

    The learning rate is 0: spans, and with them shapes, stay as the first steps will need them. Where the
    shapes of later parts of the training are other ones, as those of windows that grow, each is run once
    before. `done` is the fraction of the training that is done.
    """
    model, device = updater.model, updater.device
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scale = updater.scaler.state_dict()
    optimizers = strategy.optimizers_of(stage)
    set_rate(optimizers, 0.0)

    def run(block: TokenBlock, state: State) -> State:
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
        return state

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if (block := blocks.next(position)) is not None:
            for later in _with_other_shapes(model, state, done):
                model.progress(later)
                run(block, state)
        model.progress(done)
        for _ in range(steps):
            if block is None:
                break
            state = run(block, state)
            block = blocks.next(block.position)
    updater.scaler.load_state_dict(scale)
    model.load_state_dict(weights)


def _with_other_shapes(model: LanguageModel, state: State, done: float) -> list[float]:
    """A fraction of the training for each further shape that the model will have, the last shape first."""
    model.progress(done)
    known, found = {model.shape_key(state)}, []
    for number in range(1, PROBES + 1):
        later = done + (1.0 - done) * number / PROBES
        model.progress(later)
        if (key := model.shape_key(state)) not in known:
            known.add(key)
            found.append(later)
    return found[::-1]
