"""A search that is small but has everything in it: learned spans, two stages, dropout, micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longspan.config import RunConfig, schema
from longspan.models import Supernet, build_run

from ..training.runs import small_table

VOCABULARY = 13
BY_TURNS = {
    "updates": "alternate",
    "architecture_every": 3,
    "warm_up_steps": 4,
    "architecture_learning_rate": 0.1,
}


def search_table(text: Path, updates: str = "alternate") -> dict[str, Any]:
    table = small_table(text)
    table["name"] = "hunt"
    table["search"] = {"num_blocks": 3, "cost_weight": 0.01, **(BY_TURNS if updates == "alternate" else {})}
    table["stage"][0]["steps"], table["stage"][1]["steps"] = 14, 9
    table["training"] |= {"log_every": 4, "evaluate_every": 10, "checkpoint_every": 5}
    return table


def search_config(text: Path, updates: str = "alternate", **changes: Any) -> RunConfig:
    """The small search with dotted options changed, written with `__` for the dots."""
    table = search_table(text, updates)
    for name, value in changes.items():
        schema.override(
            table, name.replace("__", "."), value if isinstance(value, str) else json.dumps(value)
        )
    return schema.read(RunConfig, table)


def tiny_supernet(config: RunConfig) -> Supernet:
    model = build_run(config, VOCABULARY)
    assert isinstance(model, Supernet)
    return model
