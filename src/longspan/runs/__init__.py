"""Run folders and checkpoints: what training leaves behind and everything else reads."""

from longspan.runs.checkpoint import Checkpoint
from longspan.runs.environment import pick_device
from longspan.runs.folder import RunFolder

__all__ = ["Checkpoint", "RunFolder", "pick_device"]
