"""Compares `scaling_model.py` with two processes on two CPU cores: bytes and time of a training step.

    python benchmarks/scaling_check.py [--recipes NAME ...] [--rounds N] [--steps N] [--json FILE]

A round is one start of torchrun with two gloo processes, one core and one thread each. It measures
collectives of several sizes, steps with DDP and with FSDP2, and steps of both processes without
communication. Times are the best of all rounds. Bytes are those of the loopback interface: the processes have
a network of their own (`unshare --net`, which needs root), so nothing else is counted.

The prediction is the time without communication, plus the bytes of the model over the measured bandwidth.
Nothing overlaps, because the threads of gloo compute on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longspan import distributed, recipes
from longspan.config import RunConfig, schema
from longspan.models import LanguageModel, build_run
from longspan.optim import build_optimizers
from longspan.training import parallel
from longspan.training.step import Updater
from scaling_model import FLOAT32, Network, Sizes, all_reduce, ddp, fsdp, gather, muon_exchange, muon_gather
from scaling_table import sizes_of

RECIPES = ("enwik8-small", "quickstart")
PROCESSES, LANES, BLOCK = 2, 4, 64
VOCABULARY = 256
SIZES = (2**16, 2**20, 2**23, 2**25)
COLLECTIVES = 10
PREDICTED = {"all_reduce": all_reduce, "all_gather": gather, "reduce_scatter": all_reduce}
"""gloo computes a reduce-scatter as an all-reduce, of which a process drops a part; NCCL does not."""
COUNTING = Network(gpus_per_node=PROCESSES, in_node=1.0, between_nodes=1.0, latency=0.0)
"""A second on it is a byte that a process sends."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if "RANK" in os.environ:
        worker(args.recipes, args.steps)
        return
    rounds = [_round(args.recipes, args.steps) for _ in range(args.rounds)]
    report = compared(rounds, args.recipes)
    print(table(report))
    if args.json is not None:
        args.json.write_text(
            json.dumps(report | {"torch": torch.__version__, "rounds": rounds}, indent=1) + "\n"
        )


def _round(names: Sequence[str], steps: int) -> dict[str, Any]:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={PROCESSES}",
    ]
    command = [*torchrun, __file__, "--steps", str(steps), "--recipes", *names]
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def worker(names: Sequence[str], steps: int) -> None:
    """One of the processes. The first prints what it measured."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[int(os.environ["LOCAL_RANK"]) % len(cores)]])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {kind: {} for kind in PREDICTED}
    found["steps"] = {name: {} for name in names}
    for size in SIZES:
        whole = torch.ones(size // FLOAT32)
        part = whole[: len(whole) // PROCESSES].clone()
        found["all_reduce"][size] = _measured(partial(dist.all_reduce, whole), COLLECTIVES)
        collect = partial(dist.all_gather_into_tensor, whole, part)
        found["all_gather"][size] = _measured(collect, COLLECTIVES)
        scatter = partial(dist.reduce_scatter_tensor, part, whole)
        found["reduce_scatter"][size] = _measured(scatter, COLLECTIVES)
    for name in names:
        for kind in ("ddp", "fsdp"):
            found["steps"][name][kind] = _measured(_step(name, kind), steps)
    dist.barrier()
    dist.destroy_process_group()
    for name in names:  # both processes at once: they share the memory of the machine
        found["steps"][name]["alone"] = _measured(_step(name, "alone"), steps)
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


def _measured(work: Callable[[], object], times: int) -> dict[str, float]:
    """The best time, and the bytes on the network of one call (the sum of all processes)."""
    for _ in range(2):
        work()
    seconds, before = [], _sent()
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "bytes": (_sent() - before) / times}


def _sent() -> int:
    if dist.is_initialized():
        dist.barrier()
    (line,) = (
        line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")
    )
    return int(line.split(":")[1].split()[8])


def _config(name: str) -> RunConfig:
    sizes = {"batch_size": LANES, "block_length": BLOCK, "segment_length": None, "compile": False}
    given = recipes.load(name)
    given["training"] = {k: v for k, v in (given["training"] | sizes).items() if v is not None}
    return schema.read(RunConfig, given)


def _model(config: RunConfig) -> LanguageModel:
    torch.manual_seed(1)
    return build_run(config, VOCABULARY)


def _step(name: str, kind: str) -> Callable[[], object]:
    """A training step with `LANES` lanes on every process."""
    config = _config(name)
    model = _model(config)
    if kind == "fsdp":
        parallel.shard(model, detach_states=True)
    updater = Updater(model, precision="float32", sharded=kind == "fsdp")
    optimizers = build_optimizers(model, config.stage[0])
    state, tokens_BT = distributed.initial_state(model, LANES), torch.randint(VOCABULARY, (LANES, BLOCK + 1))

    def step() -> None:
        updater.update(tokens_BT[:, :-1], tokens_BT[:, 1:], state, optimizers)

    return step


def compared(rounds: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The best of all rounds, and what the model predicts from them."""

    def best(*path: str) -> float:
        found = []
        for one in rounds:
            value: Any = one
            for key in path:
                value = value[key]
            found.append(float(value["seconds"]))
        return min(found)

    small, large = str(SIZES[0]), str(SIZES[-1])
    latency = best("all_reduce", small) / 2
    bandwidth = SIZES[-1] * 2 * (PROCESSES - 1) / PROCESSES / (best("all_reduce", large) - 2 * latency)
    network = Network(PROCESSES, bandwidth, bandwidth, latency)
    lines = []
    for name in names:
        config = _config(name)
        model = _model(config)
        sizes = sizes_of(model, build_optimizers(model, config.stage[0]))
        alone = best("steps", name, "alone")
        for kind in ("ddp", "fsdp"):
            lines.append(
                {
                    "recipe": name,
                    "kind": kind,
                    "parameters": sizes.parameters,
                    "predicted_bytes": PROCESSES * communication(sizes, kind, COUNTING),
                    "bytes": rounds[0]["steps"][name][kind]["bytes"],
                    "alone_seconds": alone,
                    "predicted_seconds": alone + communication(sizes, kind, network),
                    "seconds": best("steps", name, kind),
                }
            )
    collectives = [
        {
            "kind": kind,
            "size": size,
            "predicted_bytes": PROCESSES * function(size, PROCESSES, COUNTING),
            "bytes": rounds[0][kind][str(size)]["bytes"],
            "predicted_seconds": function(size, PROCESSES, network),
            "seconds": best(kind, str(size)),
        }
        for kind, function in PREDICTED.items()
        for size in SIZES
    ]
    return {"bandwidth": bandwidth, "latency": latency, "collectives": collectives, "steps": lines}


def communication(sizes: Sizes, kind: str, network: Network) -> float:
    """Seconds of a step, with matrices of Muon in float32 as on every CPU."""
    if kind == "ddp":
        passes = ddp(0.0, sizes, PROCESSES, network, captured=False)
        return passes.communication + muon_gather(sizes.matrices, PROCESSES, network, FLOAT32)
    passes = fsdp(0.0, sizes, PROCESSES, network)
    as_all_reduce = gather(FLOAT32 * (sizes.blocks + sizes.outside), PROCESSES, network)  # see `PREDICTED`
    muon = muon_exchange(sizes.matrices, PROCESSES, network, FLOAT32)
    return passes.communication + as_all_reduce + muon


def table(report: Mapping[str, Any]) -> str:
    lines = [
        f"bandwidth {report['bandwidth'] / 1e9:.2f} GB/s, latency {1e6 * report['latency']:.0f} µs",
        "",
        "| what | MB sent, model | measured | ms, model | measured |",
        "|---|---|---|---|---|",
    ]
    for one in report["collectives"]:
        lines.append(_row(f"{one['kind'].replace('_', '-')} of {one['size'] / 1e6:.1f} MB", one))
    for one in report["steps"]:
        lines.append(_row(f"{one['recipe']}, {one['kind'].upper()}", one))
    return "\n".join(lines)


def _row(what: str, one: Mapping[str, Any]) -> str:
    sent = f"{one['predicted_bytes'] / 1e6:.2f} | {one['bytes'] / 1e6:.2f}"
    return f"| {what} | {sent} | {1e3 * one['predicted_seconds']:.1f} | {1e3 * one['seconds']:.1f} |"


if __name__ == "__main__":
    main()
