"""Pack recorded runs of Transformer-XL (the original and Hugging Face's) into compact files for the tests.

    python tests/golden/pack_transformer_xl.py RECORDED_CASE_FOLDER ...

A recorded case is a folder with the weights, config.json, tensors.safetensors and a README.md whose last
table gives, per group of tensors, how far a float64 computation lies from the recorded float32 one. Kept are
the weights, inputs, outputs and the gradients of the second block; of most cases the weights after three
updates; of one the updates that go on from a stored optimizer. All of it for every case would be too large.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

KEPT = (
    r"data|eval[AB]\.(x|y|nll|nll_next_token|mem_len_after)\.\d+|eval[AB]\.logprob_last_block|"
    r"eval[AB]\.logprob\.4|evaluate\.loss|grad\d\.loss|grad1\..*"
)
UPDATES = r"train\.(loss|lr)\.\d|step3\..*"
FROM_A_STORED_OPTIMIZER = r"grad0\..*|restart_train\..*|restart_step3\..*"

WITHOUT_UPDATES = ("txl_no_mem", "txl_same_length_clamp", "txl_adaptive_div1_noproj")
WITH_A_STORED_OPTIMIZER = ("txl_basic",)


def rounding(readme: str) -> dict[str, float]:
    """Group -> float64 column of the table of tolerances."""
    rows = re.findall(r"^\| `([\w()]+)` \|.*\| ([\d.e+-]+) \|$", readme, flags=re.MULTILINE)
    return {group: float(value) for group, value in rows}


def pack(case: Path) -> Path:
    recorded = load_file(case / "tensors.safetensors")
    stored_optimizer = case.name in WITH_A_STORED_OPTIMIZER
    more = FROM_A_STORED_OPTIMIZER if stored_optimizer else UPDATES
    pattern = re.compile(KEPT if case.name in WITHOUT_UPDATES else f"{KEPT}|{more}")
    kept = {name: tensor for name, tensor in recorded.items() if pattern.fullmatch(name)}
    file = next(case / name for name in ("checkpoint.pt", "pytorch_model.bin") if (case / name).exists())
    weights = torch.load(file, weights_only=True)
    # Tied weights have several names in the state_dict; recorded gradients name each parameter once.
    parameters = [name for name in weights if f"grad1.{name}" in recorded]
    kept |= {f"weights.{name}": weights[name] for name in parameters}
    facts = json.loads((case / "config.json").read_text())
    if (case / "case.json").exists():
        facts = {"model": facts, **json.loads((case / "case.json").read_text())}
    facts["rounding"] = rounding((case / "README.md").read_text())
    if stored_optimizer:
        optimizer = torch.load(case / "optimizer.pt", weights_only=True)
        facts["updates_before"] = int(optimizer["state"][0]["step"])
        for number, entries in optimizer["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                kept[f"optimizer.{key}.{parameters[number]}"] = entries[key]
    target = Path(__file__).parent / f"{case.name}.safetensors"
    save_file({name: t.contiguous() for name, t in kept.items()}, target, {"facts": json.dumps(facts)})
    return target


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        print(pack(Path(folder)))
