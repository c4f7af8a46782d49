"""Run folders and checkpoints: written by training, read by everything else."""

from longspan.runs.checkpoint import Checkpoint
from longspan.runs.environment import pick_device
from longspan.runs.folder import RunFolder

__all__ = ["Checkpoint", "RunFolder", "pick_device"]
