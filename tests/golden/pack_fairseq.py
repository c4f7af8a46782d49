"""Pack a recorded run of fairseq's examples/adaptive_span into a compact file for the tests.

    python tests/golden/pack_fairseq.py RECORDED_CASE_FOLDER ...

Kept: the weights, inputs, the outputs of three blocks, the losses of all, spans, gradients, and the weights
after three updates. Of the case with one span per layer the first block's gradients are those of the spans.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from pack import rounding

KEPT = (
    r"data|cache_size|eval\.logprob\.[018]|eval\.(loss|aux_loss|cache_len)\.\d|span\..*|"
    r"grad[01]\.(aux_)?loss|grad[01]\..*current_val|grad1\..*|train\.(aux_)?loss\.\d|step3\..*"
)
WITH_ALL_GRADIENTS = "fairseq_adaptive_span"


def pack(case: Path) -> Path:
    recorded = load_file(case / "tensors.safetensors")
    pattern = re.compile(rf"{KEPT}|grad0\..*" if case.name == WITH_ALL_GRADIENTS else KEPT)
    kept = {name: tensor for name, tensor in recorded.items() if pattern.fullmatch(name)}
    for name, tensor in torch.load(case / "checkpoint.pt", weights_only=True)["model"].items():
        if "mask_template" not in name:
            kept[f"weights.{name.removeprefix('decoder.model.')}"] = tensor
    facts = {
        "config": json.loads((case / "config.json").read_text()),
        "rounding": rounding((case / "README.md").read_text()),
    }
    target = Path(__file__).parent / f"{case.name}.safetensors"
    save_file({name: t.contiguous() for name, t in kept.items()}, target, {"facts": json.dumps(facts)})
    return target


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        print(pack(Path(folder)))
