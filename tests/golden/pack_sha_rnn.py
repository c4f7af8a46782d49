"""Pack a recorded run of the original SHA-RNN into a compact file for the tests.

    python tests/golden/pack_sha_rnn.py RECORDED_CASE_FOLDER ...

Kept: the weights, inputs, outputs, states, gradients, and the weights after three updates of both LAMBs
(`fork.` is the author's own); the losses of the original's own training loop and, of the weights that it ends
with, the vectors, for size; not what the original holds and never uses.
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

KEPT = re.compile(r"data|eval\.(h|logprob|loss|after_block_5).*|evaluate\.loss|gen\.h|grad[03]\..*")
KEPT_OF_THE_LOOP = re.compile(r"loop\.(loss|lr|start_and_len|end\..*)")
KEPT_TRAINING = re.compile(r"step3\..*|train\.(loss|lr)\.\d")


def pack(case: Path) -> Path:
    checkpoint = torch.load(case / "checkpoint.pt", weights_only=True)
    recorded = load_file(case / "tensors.safetensors")
    fork = load_file(case / "extra_lamb_fork_min_trust.safetensors")
    weights = dict(checkpoint["model"])
    weights |= {f"criterion.{name}": tensor for name, tensor in checkpoint["criterion"].items()}
    used = [name for name in weights if f"grad0.{name}" in recorded]
    kept = {f"weights.{name}": weights[name] for name in used}
    kept |= {name: tensor for name, tensor in recorded.items() if KEPT.fullmatch(name)}
    kept |= {
        name: tensor
        for name, tensor in recorded.items()
        if KEPT_OF_THE_LOOP.fullmatch(name) and (tensor.squeeze().dim() < 2 or ".end." not in name)
    }
    for lamb, tensors in (("pypi", recorded), ("fork", fork)):
        kept |= {f"{lamb}.{name}": t for name, t in tensors.items() if KEPT_TRAINING.fullmatch(name)}
    unused = [name for name in weights if name not in used]
    kept = {name: tensor for name, tensor in kept.items() if not name.endswith(tuple(unused))}
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
