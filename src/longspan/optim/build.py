"""Builds the optimizers of a stage."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from longspan.compile_fallback import CompileFallback
from longspan.config import StageConfig
from longspan.distributed import by_placement, is_sharded
from longspan.errors import UserError
from longspan.models.interface import LanguageModel
from longspan.optim.adagrad import Adagrad
from longspan.optim.groups import group_of_parameters
from longspan.optim.lamb import Lamb
from longspan.optim.muon import Muon

_MOMENTUM = {"muon": 0.95, "sgd": 0.0}  # defaults, if the stage has no momentum


def build_optimizers(
    model: LanguageModel, stage: StageConfig, *, without: Iterable[nn.Parameter] = ()
) -> list[Optimizer]:
    """The optimizers of a stage. Together they hold every trainable parameter once, except those `without`.

    `group_of_parameters` decides what Muon trains and, unless `weight_decay_of` is "all", what has weight
    decay. Every group stores its peak rate as `peak`, which `set_rate` scales.
    """
    rate = stage.learning_rate
    elsewhere = {id(p) for p in without}
    groups_of = {p: group for p, group in group_of_parameters(model).items() if id(p) not in elsewhere}

    def members(*kinds: str) -> list[nn.Parameter]:
        return [p for p, group in groups_of.items() if group in kinds]

    apart: list[dict[str, Any]] = []
    not_matrices = ["no_decay", "span"]
    decay = stage.weight_decay
    decay_of_others = decay if stage.weight_decay_of == "all" else 0.0
    if stage.span_learning_rate is not None:
        not_matrices.remove("span")
        apart = _group(members("span"), stage.span_learning_rate, decay_of_others)
    if stage.optimizer == "adagrad":
        every = _group(members("matrix", "decay", *not_matrices), rate)
        groups = [{"params": g["params"], "peak": g["peak"]} for g in every + apart]
        return [Adagrad(groups, lr=rate, clip=stage.clip_norm)]
    others = members(*not_matrices)
    momentum = _MOMENTUM.get(stage.optimizer, 0.0) if stage.momentum is None else stage.momentum
    if stage.optimizer == "muon":
        matrices, decaying = members("matrix"), members("decay")
        if not matrices:
            raise UserError("muon needs matrices inside blocks, and this model has none: use adamw")
        muon = Muon(_group(matrices, rate, decay), lr=rate, momentum=momentum)
        rate_of_others = rate if stage.adamw_learning_rate is None else stage.adamw_learning_rate
        groups = _group(decaying, rate_of_others, decay) + _group(others, rate_of_others, decay_of_others)
        return [muon, _adam(torch.optim.AdamW, groups + apart, stage)]
    groups = _group(members("matrix", "decay"), rate, decay) + _group(others, rate, decay_of_others) + apart
    if stage.optimizer == "lamb":
        betas = (stage.beta1, stage.beta2)
        return [Lamb(groups, lr=rate, betas=betas, min_trust=stage.min_trust)]
    if stage.optimizer == "sgd":
        # torch has no fused SGD for sharded tensors
        fused = not any(map(is_sharded, groups_of))
        return [torch.optim.SGD(groups, lr=rate, momentum=momentum, fused=fused, foreach=not fused)]
    return [_adam(torch.optim.Adam if stage.optimizer == "adam" else torch.optim.AdamW, groups, stage)]


def compile_updates(optimizers: Iterable[Optimizer], fallback: CompileFallback) -> None:
    """Compile the updates for which torch has no fused kernel."""
    for optimizer in optimizers:
        if isinstance(optimizer, Adagrad | Lamb):
            fallback.compile(partial(optimizer.compile, fallback))


def set_rate(optimizers: list[Optimizer], fraction: float) -> None:
    """Set the learning rate of every group to this fraction of its peak rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * fraction


def _adam(kind: type[torch.optim.Adam], groups: list[dict[str, Any]], stage: StageConfig) -> torch.optim.Adam:
    return kind(groups, lr=stage.learning_rate, betas=(stage.beta1, stage.beta2), fused=True)


def _group(parameters: list[nn.Parameter], peak: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """The group of these parameters, or none if there are none; sharded ones have a group of their own."""
    return [
        {"params": alike, "peak": peak, "weight_decay": weight_decay} for alike in by_placement(parameters)
    ]
