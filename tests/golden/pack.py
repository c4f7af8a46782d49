"""Pack one recorded run of an original implementation into a compact file for the tests.

    python tests/golden/pack.py RECORDED_CASE_FOLDER ...

A recorded case is a folder with checkpoint.pt, config.json, tensors.safetensors and a README.md whose last
table gives, per group of tensors, how far a float64 computation lies from the recorded float32 one. Kept:
the weights, the optimizer's state, inputs, outputs, gradients and the weights after three updates. Of one
large case the first block's gradients are those of the vocabulary only: other cases have such layers too.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

KEPT = re.compile(
    r"data|cache_size|(eval|short_cache)\.(logprob|nll|cache_len|loss)\.\d+|short_cache\.span_value|"
    r"eval\.(logprob|in_emb)_last_block|full_eval\..*|"
    r"grad[01]\..*|train\.(loss|lr)\.\d+|step3\..*|span\..*"
)
WITHOUT = {"adaptive_io_untied": re.compile(r"grad0\.(layers|key_pe).*")}


def rounding(readme: str) -> dict[str, float]:
    """Group -> float64 column of the table of tolerances."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d.e+-]+) \|$", readme, flags=re.MULTILINE)
    return {group: float(value) for group, value in rows}


def pack(case: Path) -> Path:
    checkpoint = torch.load(case / "checkpoint.pt", weights_only=True)
    recorded = load_file(case / "tensors.safetensors")
    without = WITHOUT.get(case.name, re.compile("nothing"))
    kept = {
        name: tensor
        for name, tensor in recorded.items()
        if KEPT.fullmatch(name) and not without.fullmatch(name)
    }
    weights = {name.removeprefix("module."): tensor for name, tensor in checkpoint["model"].items()}
    first_names: dict[int, str] = {}  # the original lists spans twice, and tied tables
    for name, weight in weights.items():
        if "mask_template" not in name:
            first_names.setdefault(weight.data_ptr(), name)
    parameters = list(first_names.values())
    kept |= {f"weights.{name}": weights[name] for name in parameters}
    for number, entries in checkpoint["optimizer"]["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                kept[f"optimizer.{key}.{parameters[number]}"] = value
    facts = {
        "config": json.loads((case / "config.json").read_text()),
        "updates_before": checkpoint.get("scheduler_iter", 0),
        "rounding": rounding((case / "README.md").read_text()),
    }
    target = Path(__file__).parent / f"{case.name}.safetensors"
    save_file({name: t.contiguous() for name, t in kept.items()}, target, {"facts": json.dumps(facts)})
    return target


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        print(pack(Path(folder)))
