"""From a stage's settings to the optimizers that move a model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from longspan.config import StageConfig
from longspan.errors import UserError
from longspan.kernels.compile_fallback import CompileFallback
from longspan.layers.span import LearnedSpan
from longspan.models.interface import LanguageModel
from longspan.optim.adagrad import Adagrad
from longspan.optim.lamb import Lamb
from longspan.optim.muon import Muon

_MOMENTUM = {"muon": 0.95, "sgd": 0.0}  # where the stage does not say


def build_optimizers(
    model: LanguageModel, stage: StageConfig, *, without: Iterable[nn.Parameter] = ()
) -> list[Optimizer]:
    """The optimizers of a stage; between them they hold every trainable parameter once, but those `without`.

    Only matrices of linear and recurrent layers decay, and not the head's. Every group remembers its highest
    rate as `peak`, which `set_rate` scales.
    """
    rate = stage.learning_rate
    elsewhere = {id(p) for p in without}
    apart: list[dict[str, Any]] = []
    if stage.span_learning_rate is not None:
        spans = [p for p in _span_parameters(model) if id(p) not in elsewhere]
        apart = _group(spans, stage.span_learning_rate)
        elsewhere |= {id(p) for p in spans}
    every = [p for p in model.parameters() if p.requires_grad and id(p) not in elsewhere]
    if stage.optimizer == "adagrad":
        groups = [{"params": g["params"], "peak": g["peak"]} for g in _group(every, rate) + apart]
        return [Adagrad(groups, lr=rate, clip=stage.clip_norm)]
    matrices = [p for p in _block_matrices(model) if id(p) not in elsewhere]
    inside = {id(p) for p in matrices}
    others = [p for p in every if id(p) not in inside]
    momentum = _MOMENTUM.get(stage.optimizer, 0.0) if stage.momentum is None else stage.momentum
    if stage.optimizer == "muon":
        if not matrices:
            raise UserError("muon needs matrices inside blocks and this model has none; use adamw")
        muon = Muon(_group(matrices, rate, stage.weight_decay), lr=rate, momentum=momentum)
        rate_of_others = rate if stage.adamw_learning_rate is None else stage.adamw_learning_rate
        return [muon, _adam(torch.optim.AdamW, _group(others, rate_of_others) + apart, stage)]
    groups = _group(matrices, rate, stage.weight_decay) + _group(others, rate) + apart
    if stage.optimizer == "lamb":
        betas = (stage.beta1, stage.beta2)
        return [Lamb(groups, lr=rate, betas=betas, min_trust=stage.min_trust)]
    if stage.optimizer == "sgd":
        return [torch.optim.SGD(groups, lr=rate, momentum=momentum, fused=True)]
    return [_adam(torch.optim.Adam if stage.optimizer == "adam" else torch.optim.AdamW, groups, stage)]


def compile_updates(optimizers: Iterable[Optimizer], fallback: CompileFallback) -> None:
    """Compile the updates that torch has not as one operation."""
    for optimizer in optimizers:
        if isinstance(optimizer, Adagrad | Lamb):
            fallback.compile(partial(optimizer.compile, fallback))


def set_rate(optimizers: list[Optimizer], fraction: float) -> None:
    """Let the next update use this fraction of every group's highest rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * fraction


def _adam(kind: type[torch.optim.Adam], groups: list[dict[str, Any]], stage: StageConfig) -> torch.optim.Adam:
    return kind(groups, lr=stage.learning_rate, betas=(stage.beta1, stage.beta2), fused=True)


def _group(parameters: list[nn.Parameter], peak: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """One parameter group, or none where there are no parameters."""
    return [{"params": parameters, "peak": peak, "weight_decay": weight_decay}] if parameters else []


def _span_parameters(model: LanguageModel) -> list[nn.Parameter]:
    return [module.fraction_H for module in model.modules() if isinstance(module, LearnedSpan)]


def _block_matrices(model: LanguageModel) -> list[nn.Parameter]:
    """Matrices of linear and recurrent layers: no embeddings, head, norms, biases, spans."""
    head = {id(p) for p in model.head.parameters()}
    kinds = (nn.Linear, nn.RNNBase)
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    found = {
        id(p): p
        for layer in layers
        for p in layer.parameters(recurse=False)
        if p.ndim == 2 and p.requires_grad and id(p) not in head
    }
    return list(found.values())
