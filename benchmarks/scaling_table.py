"""Predicts speed and memory of the large recipes on 8, 64 and 512 GPUs: the tables of docs/scaling.md.

    python benchmarks/scaling_table.py [--json FILE]

The rate of computation is that of a smaller recipe of the same architecture, measured on one H200. The
network is an assumption. Nothing here was measured on more than one GPU.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from longspan import recipes
from longspan.bench.spans import set_profile
from longspan.cli.recipes import BYTES, known_vocabulary_size
from longspan.config import RunConfig, schema
from longspan.flops import Shape
from longspan.models import LanguageModel, build_run
from longspan.optim import Muon, build_optimizers, state_bytes
from scaling_model import (
    FLOAT32,
    Memory,
    Network,
    Sizes,
    Step,
    ddp,
    fsdp,
    memory,
    muon_exchange,
    muon_flops,
    muon_gather,
)

# NVLink; between nodes one 400 Gbit/s card per GPU at 80%, or one 100 Gbit/s card per node at 80%.
NETWORKS = {
    "fast": Network(gpus_per_node=8, in_node=300e9, between_nodes=8 * 40e9, latency=10e-6),
    "slow": Network(gpus_per_node=8, in_node=300e9, between_nodes=10e9, latency=10e-6),
}
MATRIX_RATE = 600e12  # FLOP/s of Muon's products, which are large and in bf16: an assumption


@dataclass(frozen=True)
class Measured:
    """Training steps on one H200: benchmarks/records/2026-11-16-h200-fewer-kernels and -kept-weights."""

    recipe: str
    batch_size: int
    tokens_per_second: float
    activations: float  # bytes per token, layer and unit of the width


MEASURED = {
    "adaptive-span": Measured("enwik8", 64, 970e3, 51),
    "all-attention": Measured("enwik8-pers-small", 64, 621e3, 46),
    "transformer-xl": Measured("txl-enwik8", 64, 679e3, 71),
    "modern": Measured("flagship", 32, 1138e3, 51),  # its memory was not measured: as adaptive span
}
LARGE = ("enwik8-large", "text8-large", "txl-wikitext-103", "wiki103-pers", "flagship-large")
GPUS = (8, 64, 512)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    lines = [line for name in LARGE for line in predictions(Recipe(name))]
    print(times_table(lines), memory_table(lines), sep="\n\n")
    if args.json is not None:
        networks = {name: asdict(network) for name, network in NETWORKS.items()}
        args.json.write_text(json.dumps({"networks": networks, "predictions": lines}, indent=1) + "\n")


class Recipe:
    """What the model needs to know of a recipe."""

    def __init__(self, name: str) -> None:
        self.name = name
        config = schema.read(RunConfig, recipes.load(name))
        model = build(config)
        self.architecture, training = config.architecture, config.training
        self.lanes, self.block_length = training.batch_size, training.block_length
        self.flops = model.flops(Shape(self.lanes, self.block_length))
        optimizers = build_optimizers(model, config.stage[0])
        self.sizes = sizes_of(model, optimizers)
        elements = state_bytes(optimizers, lambda parameter: parameter.numel())
        self.optimizer_copies = elements / self.sizes.parameters
        self.state = sum(t.nbytes for t in model.initial_state(1).flatten().values())
        depth = getattr(config.model, "num_layers", None) or self.sizes.num_blocks
        self.activations = (
            MEASURED[self.architecture].activations * self.block_length * depth * config.model.width
        )


def build(config: RunConfig) -> LanguageModel:
    """With the spans that `longspan bench --spans profile` sets, as in the measurements."""
    model = build_run(config, known_vocabulary_size(config.data) or BYTES)
    if config.architecture in ("adaptive-span", "all-attention"):
        set_profile(model, config.name)
    return model


def sizes_of(model: LanguageModel, optimizers: Sequence[torch.optim.Optimizer]) -> Sizes:
    blocks = [sum(p.numel() for p in block.parameters() if p.ndim > 1) for block in model.blocks]
    inside = {id(p) for block in model.blocks for p in block.parameters()}
    outside = sum(p.numel() for p in model.parameters() if p.ndim > 1 and id(p) not in inside)
    matrices: Counter[tuple[int, int]] = Counter()
    for optimizer in optimizers:
        if isinstance(optimizer, Muon):
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                rows, columns = p.shape[-2:]
                matrices[rows, columns] += p.numel() // (rows * columns)
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        num_blocks=len(blocks),
        blocks=sum(blocks),
        largest_block=max(blocks),
        outside=outside,
        matrices=dict(matrices),
    )


def rate_of(architecture: str) -> float:
    """FLOP/s of training steps on one GPU: three times the FLOPs of the forward pass."""
    measured = MEASURED[architecture]
    config = schema.read(RunConfig, recipes.load(measured.recipe))
    shape = Shape(measured.batch_size, config.training.block_length)
    return 3 * build(config).flops(shape) * measured.tokens_per_second


def predictions(recipe: Recipe) -> list[dict[str, Any]]:
    """With the recipe's batch on every GPU, and with one lane on every GPU."""
    rate = rate_of(recipe.architecture)
    return [
        predict(recipe, rate, n, lanes, sharded)
        for lanes in (recipe.lanes, 1)
        for n in GPUS
        for sharded in (False, True)
    ]


def predict(recipe: Recipe, rate: float, n: int, lanes: int, sharded: bool) -> dict[str, Any]:
    sizes = recipe.sizes
    passes = 3 * recipe.flops * lanes * recipe.block_length / rate
    muon = {gpus: muon_flops(sizes.matrices, gpus) / MATRIX_RATE for gpus in (1, n)}
    steps = {}
    for name, network in NETWORKS.items():
        if sharded:
            step = fsdp(passes, sizes, n, network)
            exchange = muon_exchange(sizes.matrices, n, network)
        else:
            step = ddp(passes, sizes, n, network, captured=True)
            exchange = muon_gather(sizes.matrices, n, network)
        step = Step(step.compute + muon[n], step.communication + exchange, step.exposed + exchange)
        steps[name] = asdict(step) | {"efficiency": (passes + muon[1]) / step.total}
    held = memory(
        sizes,
        n,
        optimizer_copies=recipe.optimizer_copies,
        activations=recipe.activations,
        state=recipe.state,
        lanes=lanes,
        sharded=sharded,
    )
    return {
        "recipe": recipe.name,
        "parameters": sizes.parameters,
        "gradient_bytes": FLOAT32 * sizes.parameters,
        "gpus": n,
        "lanes_per_gpu": lanes,
        "sharded": sharded,
        "steps": steps,
        "memory": asdict(held),
    }


def times_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds of computation and exposed communication, and the efficiency, with DDP and sharded."""
    table = [
        "| recipe | GPUs | lanes per GPU | compute | DDP, fast | efficiency | DDP, slow | efficiency | "
        "sharded, fast | efficiency | sharded, slow | efficiency |",
        "|---" * 12 + "|",
    ]
    for whole, sharded in zip(lines[::2], lines[1::2], strict=True):
        cells = [whole["recipe"], f"{whole['gpus']}", f"{whole['lanes_per_gpu']}"]
        cells.append(_milliseconds(whole["steps"]["fast"]["compute"]))
        for line in (whole, sharded):
            for name in NETWORKS:
                step = line["steps"][name]
                cells += [_milliseconds(step["exposed"]), f"{step['efficiency']:.0%}"]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def memory_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """GB of one GPU."""
    parts = ("weights", "gradients", "optimizer", "activations", "carried_state")
    names = " | ".join(part.replace("_", " ") for part in parts)
    table = [
        f"| recipe | GPUs | lanes per GPU | sharded | {names} | all |",
        "|---" * (len(parts) + 5) + "|",
    ]
    for line in lines:
        if line["gpus"] != GPUS[0] and not line["sharded"]:
            continue  # as with fewer GPUs
        held = Memory(**line["memory"])
        cells = [
            line["recipe"],
            f"{line['gpus']}",
            f"{line['lanes_per_gpu']}",
            "yes" if line["sharded"] else "no",
        ]
        cells += [f"{getattr(held, part) / 1e9:.2f}" for part in parts]
        table.append(f"| {' | '.join(cells)} | {held.total / 1e9:.1f} |")
    return "\n".join(table)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


if __name__ == "__main__":
    main()
