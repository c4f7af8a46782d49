"""Reads checkpoints of version 0.1, which use older names for tensors, facts and options."""

from __future__ import annotations

from typing import Any

from longspan.config import ModernConfig

_TENSORS = {".slots.": ".persistent.", ".query_key_norm.": ".qk_norm."}
_FACTS = {"window": "loss_meter", "settled": "fixed_options"}
_OPTIONS = {
    "training.passage_length": "training.segment_length",
    "model.num_slots": "model.num_persistent",
    "model.rotary_base": "model.rope_base",
    "model.query_key_norm": "model.qk_norm",
}
_REMOVED = {f"model.{name}" for name in ModernConfig.REMOVED}


def current_tensor_name(name: str) -> str:
    for old, new in _TENSORS.items():
        name = name.replace(old, new)
    return name


def current_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of a checkpoint under their current names."""
    facts = {_FACTS.get(name, name): value for name, value in facts.items()}
    if (options := facts.get("fixed_options")) is not None:
        facts["fixed_options"] = {
            _OPTIONS.get(name, name): value for name, value in options.items() if name not in _REMOVED
        }
    progress = facts.get("progress")
    position = progress.get("position") if isinstance(progress, dict) else None
    if isinstance(position, dict) and "passes" in position:
        position["epoch"] = position.pop("passes")
    return facts
