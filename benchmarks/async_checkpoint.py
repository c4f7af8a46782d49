"""Measures how long a checkpoint stops the training, when processes write it in the background.

    torchrun --nproc-per-node 2 benchmarks/async_checkpoint.py [--width 512] [--steps 200] [--every 50]

Trains a stack of linear layers with Adam on random numbers, with DDP, first without checkpoints and then with
one every `--every` steps. Reports, per checkpoint, how long `save` itself stops the training, and by how much
all steps together become slower, which also counts the time that the thread in the background takes away.
Both are also given as a part of the time of a step, averaged over all steps. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from longspan import distributed
from longspan.runs.sharded_checkpoint import ShardedWriter


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if not distributed.launched():
        raise SystemExit("async_checkpoint: start it with torchrun")
    device = torch.device(f"cuda:{distributed.local_rank()}" if args.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with distributed.joined(device, 600), tempfile.TemporaryDirectory(dir=args.folder) as place:
        found = measured(args, device, Path(distributed.text_from_first(place)))
    if distributed.is_first():
        print(json.dumps(found))
    return 0


def measured(args: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, float]:
    layers = [nn.Sequential(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(args.layers)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    inputs = torch.randn(args.batch_size, args.width, device=device)
    writer, path = ShardedWriter(), folder / "last.safetensors"

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def tensors() -> dict[str, torch.Tensor]:
        held = {f"model.{name}": tensor for name, tensor in model.module.state_dict().items()}
        for (name, _), state in zip(model.named_parameters(), optimizer.state.values(), strict=True):
            held |= {f"optimizer.{name}.{key}": tensor for key, tensor in state.items()}
        return held

    def seconds(every: int | None) -> tuple[float, list[float]]:
        stopped = []
        _synchronize(device)
        began = time.perf_counter()
        for number in range(1, args.steps + 1):
            step()
            if every is not None and number % every == 0:
                _synchronize(device)
                before = time.perf_counter()
                writer.save(path, tensors(), {"step": number}, keep=2)
                stopped.append(time.perf_counter() - before)
        _synchronize(device)
        return time.perf_counter() - began, stopped

    for _ in range(5):
        step()
    writer.save(path, tensors(), {}, keep=2)  # the first one also allocates the pinned memory
    writer.wait()
    without = min(seconds(None)[0] for _ in range(args.rounds))
    rounds = []
    for _ in range(args.rounds):
        rounds.append(seconds(args.every))
        writer.wait()
    total, stopped = min(rounds)
    per_step = without / args.steps
    return {
        "ranks": distributed.size(),
        "megabytes": sum(tensor.nbytes for tensor in tensors().values()) / 1e6,
        "tensors": len(tensors()),
        "step_ms": per_step * 1e3,
        "every": args.every,
        "save_stops_ms": statistics.median(stopped) * 1e3,
        "save_stops_percent_of_a_step": 100 * statistics.median(stopped) / args.every / per_step,
        "all_steps_slower_percent": 100 * (total / without - 1),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="width of the layers")
    parser.add_argument("--layers", type=int, default=16, help="number of layers")
    parser.add_argument("--batch-size", type=int, default=256, help="rows per process")
    parser.add_argument("--steps", type=int, default=200, help="steps per round")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--rounds", type=int, default=2, help="rounds; the fastest counts")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; else a temporary folder")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
