"""Resolves `auto` for precision and compilation, for the device that a run starts on."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from longspan.config import RunConfig
from longspan.kernels.dispatch import has_triton

_COMPUTE_CAPABILITY = (8, 0)  # the first with bf16


def resolved(config: RunConfig, device: torch.device) -> RunConfig:
    """The configuration with `auto` replaced by what it means on `device`.

    A run folder holds the resolved values, so a resumed run keeps them on any machine.
    """
    training = config.training
    if training.precision == "auto":
        training = replace(training, precision=_precision(device))
    if training.compile == "auto":
        # Blocks of changing length would need code for dynamic shapes.
        fixed_shapes = not training.block_jitter
        training = replace(training, compile=fixed_shapes and _is_recent_gpu(device) and has_triton())
    return config if training is config.training else replace(config, training=training)


def _precision(device: torch.device) -> Literal["float32", "bf16"]:
    return "bf16" if _is_recent_gpu(device) else "float32"


def _is_recent_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _COMPUTE_CAPABILITY
