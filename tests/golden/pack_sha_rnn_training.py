"""Pack the recorded trainings of the original SHA-RNN into one compact file for the tests.

    python tests/golden/pack_sha_rnn_training.py RECORDED_FOLDER

Kept of the two exact recordings (float64, nothing random): settings, the numbers of the parameters in the
formula of the initial weights, block lengths and the loss of every step. The training text becomes token ids;
each lane keeps as much as the steps read.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file

OPTIMIZERS = ("adam", "lamb")


def pack(recorded: Path) -> Path:
    runs = {name: json.loads((recorded / f"exact-{name}-0.json").read_text()) for name in OPTIMIZERS}
    first = runs["adam"]
    for name in ("initial_weights", "parameters", "block_lengths"):
        assert runs["lamb"][name] == first[name]
    train = list((recorded / "data" / "train.txt").read_bytes())
    # `Counter` keeps the order of first appearance among equal counts.
    ids = {byte: number for number, (byte, _) in enumerate(Counter(train).most_common())}
    lanes = first["settings"]["lanes"]
    lane_length = len(train) // lanes
    columns = sum(first["block_lengths"]) + 2 * first["settings"]["block_length"]
    rows = torch.tensor([ids[byte] for byte in train[: lanes * lane_length]], dtype=torch.uint8)
    tensors = {
        "train": rows.view(lanes, lane_length)[:, :columns].contiguous(),
        "block_lengths": torch.tensor(first["block_lengths"], dtype=torch.uint8),
        **{f"loss.{name}": torch.tensor(runs[name]["loss_nats"], dtype=torch.float64) for name in runs},
    }
    facts = {
        "settings": {name: run["settings"] for name, run in runs.items()},
        "initial_weights": first["initial_weights"],
        "parameters": first["parameters"],
    }
    target = Path(__file__).parent / "sha_rnn_training.safetensors"
    save_file(tensors, target, {"facts": json.dumps(facts)})
    return target


if __name__ == "__main__":
    print(pack(Path(sys.argv[1])))
