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
from longspan.optim.normuon import NorMuon

_MUONS = {"muon": Muon, "normuon": NorMuon}


def build_optimizers(
    model: LanguageModel, stage: StageConfig, *, without: Iterable[nn.Parameter] = ()
) -> list[Optimizer]:
    """The optimizers of a stage. Together they hold every trainable parameter once, except those `without`.

    `group_of_parameters` decides what Muon trains and, unless `weight_decay_of` is "all", what has weight
    decay. Every group stores its peak rate as `peak`, which `set_rate` scales, and so `peak_decay` if the
    decay follows the rate.
    """
    optimizers = _build(model, stage, without)
    if stage.weight_decay_schedule == "learning-rate":
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["peak_decay"] = group["weight_decay"]
    return optimizers


def _build(model: LanguageModel, stage: StageConfig, without: Iterable[nn.Parameter]) -> list[Optimizer]:
    rate = stage.learning_rate
    elsewhere = {id(p) for p in without}
    groups_of = {p: group for p, group in group_of_parameters(model).items() if id(p) not in elsewhere}

    def members(*kinds: str) -> list[nn.Parameter]:
        return [p for p, group in groups_of.items() if group in kinds]

    apart: list[dict[str, Any]] = []
    not_matrices = ["no_decay"]
    decay = stage.weight_decay
    decay_of_others = decay if stage.weight_decay_of == "all" else 0.0
    for kind, own_rate in (
        ("embedding", stage.embedding_learning_rate),
        ("head", stage.head_learning_rate),
        ("scalar", stage.scalar_learning_rate),
        ("span", stage.span_learning_rate),
    ):
        if own_rate is None:
            not_matrices.append(kind)
        else:
            apart += _group(members(kind), own_rate, decay_of_others)
    if stage.optimizer == "adagrad":
        every = _group(members("matrix", "decay", *not_matrices), rate)
        groups = [{"params": g["params"], "peak": g["peak"]} for g in every + apart]
        return [Adagrad(groups, lr=rate, clip=stage.clip_norm)]
    others = members(*not_matrices)
    if stage.optimizer in _MUONS:
        matrices, decaying = members("matrix"), members("decay")
        if not matrices:
            raise UserError(
                f"{stage.optimizer} needs matrices inside blocks, and this model has none: use adamw"
            )
        muon = _MUONS[stage.optimizer](
            _group(matrices, rate, decay),
            lr=rate,
            momentum=stage.highest_momentum,
            cautious=stage.cautious_decay,
        )
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
        momentum = stage.highest_momentum
        return [torch.optim.SGD(groups, lr=rate, momentum=momentum, fused=fused, foreach=not fused)]
    return [_adam(torch.optim.Adam if stage.optimizer == "adam" else torch.optim.AdamW, groups, stage)]


def compile_updates(optimizers: Iterable[Optimizer], fallback: CompileFallback) -> None:
    """Compile the updates for which torch has no fused kernel."""
    for optimizer in optimizers:
        if isinstance(optimizer, Adagrad | Lamb):
            fallback.compile(partial(optimizer.compile, fallback))


def set_rate(optimizers: list[Optimizer], fraction: float) -> None:
    """Set the learning rate of every group to this fraction of its peak, and its decay if that follows."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * fraction
            if "peak_decay" in group:
                group["weight_decay"] = group["peak_decay"] * fraction


def set_momentum(optimizers: list[Optimizer], momentum: float) -> None:
    """Set the momentum of the optimizers that have one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = momentum


def _adam(kind: type[torch.optim.Adam], groups: list[dict[str, Any]], stage: StageConfig) -> torch.optim.Adam:
    betas = (stage.beta1, stage.beta2)
    return kind(groups, lr=stage.learning_rate, betas=betas, eps=stage.epsilon, fused=True)


def _group(parameters: list[nn.Parameter], peak: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """The group of these parameters, or none if there are none; sharded ones have a group of their own."""
    return [
        {"params": alike, "peak": peak, "weight_decay": weight_decay} for alike in by_placement(parameters)
    ]
