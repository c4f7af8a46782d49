"""Compares the speed of two versions: two source trees on one machine, measured in turns.

    python benchmarks/compare_commits.py --old FOLDER [--new FOLDER] [--cases NAME ...] [--json FILE]

A folder is a checkout with the package in `src/`. A case is a training step of a recipe (with optimizer and
random tokens), or the decoding of one text. Training on a GPU is bf16 and compiled, on a CPU float32. For
each case and tree one process builds and compiles the model; cases that fit into memory together are compiled
in parallel. Then the processes of a case take turns (old, new, old, new) and run back-to-back steps for
`--seconds` each. The median of a tree's turns is reported. The GPU cases take about 6 minutes on an H200.

Needs what the package imports: torch, triton, numpy, safetensors, tomli-w, rich and the imports of
`longspan.data`. `--smoke` runs tiny models on a CPU, to test this script.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DECODING_BATCH, PROMPT = 1, 512
WARM_UPS = 9  # enough to compile, capture and replay
SMALL: dict[str, Any] = {"num_layers": 2, "width": 32, "inner_width": 48, "num_heads": 2, "head_width": 16}
SMALL |= {"num_persistent": 8, "memory_length": 16, "ngram_rows": 64, "ngram_width": 16}


@dataclass(frozen=True)
class Case:
    """`goal` is the minimum ratio of new speed to old speed."""

    name: str
    recipe: str
    batch_size: int
    block_length: int
    spans: str
    gigabytes: float
    goal: float
    vocabulary_size: int = 205
    decodes: bool = False
    device: str = "cuda"


CASES = [
    Case("enwik8-64x512", "enwik8", 64, 512, "profile", 16, 0.90),
    Case("enwik8-8x4096", "enwik8", 8, 4096, "profile", 12, 0.90),
    Case("all-attention", "enwik8-pers-small", 64, 512, "profile", 20, 0.95),
    Case("transformer-xl", "txl-enwik8", 64, 512, "start", 18, 0.95),
    Case("sha-rnn-8x1024", "sha-rnn-one", 8, 1024, "start", 7, 0.95),
    Case("sha-rnn-64x1024", "sha-rnn-one", 64, 1024, "start", 33, 0.95),
    Case("flagship", "flagship", 32, 1024, "start", 15, 0.95, vocabulary_size=256),
    Case("decoding", "enwik8", 1, PROMPT, "profile", 2, 0.95, decodes=True),
    Case("cpu-training", "enwik8-small", 16, 256, "profile", 1, 0.95, device="cpu"),
    Case("cpu-decoding", "enwik8", 1, PROMPT, "profile", 1, 0.95, decodes=True, device="cpu"),
]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    by_name = {case.name: case for case in CASES}
    if args.worker:
        work(by_name[args.worker], smoke=args.smoke)
        return 0
    if args.old is None:
        raise SystemExit("compare_commits: give the other checkout with --old")
    if args.json is not None and args.json.exists():
        raise SystemExit(f"compare_commits: {args.json} exists already")
    trees = {"old": args.old.resolve(), "new": args.new.resolve()}
    for tree in trees.values():
        if not (tree / "src" / "longspan").is_dir():
            raise SystemExit(f"compare_commits: {tree} has no src/longspan: give a checkout of Longspan")
    results = []
    for batch in _batches([by_name[name] for name in args.cases], args.memory):
        results += _measured(batch, trees, args)
        if args.json is not None:  # written after every batch, so that a later failure loses nothing
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(_report(results, trees), indent=2) + "\n", encoding="utf-8")
    print(_table(results))
    return 1 if any("error" in result for result in results) else 0


def _batches(cases: list[Case], gigabytes: float) -> list[list[Case]]:
    """Groups of cases that fit into memory together, with both trees."""
    batches: list[list[Case]] = [[]]
    for case in cases:
        if batches[-1] and 2 * sum(c.gigabytes for c in [*batches[-1], case]) > gigabytes:
            batches.append([])
        batches[-1].append(case)
    return batches


def _measured(batch: list[Case], trees: dict[str, Path], args: argparse.Namespace) -> list[dict[str, Any]]:
    workers = {
        (case.name, side): _Worker(case, tree, smoke=args.smoke)
        for case in batch
        for side, tree in trees.items()
    }
    results = []
    try:
        for worker in workers.values():
            worker.answer()  # wait until it is ready
        for case in batch:
            speeds: dict[str, list[float]] = {side: [] for side in trees}
            for _ in range(args.turns):
                for side in trees:
                    found = workers[case.name, side].ask(args.seconds)
                    if found is not None:
                        speeds[side].append(found["tokens_per_second"])
            errors = {side: workers[case.name, side].error for side in trees if not speeds[side]}
            results.append(_result(case, speeds, errors))
            print(json.dumps(results[-1]), flush=True)
            for side in trees:
                workers[case.name, side].end()
    finally:
        for worker in workers.values():
            worker.end()
    return results


def _result(case: Case, speeds: dict[str, list[float]], errors: dict[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = {"case": case.name, "goal": case.goal, "tokens_per_second": speeds}
    if errors:
        return result | {"error": errors}
    medians = {side: statistics.median(turns) for side, turns in speeds.items()}
    return result | {"medians": medians, "ratio": medians["new"] / medians["old"]}


class _Worker:
    """A process that runs the model of one case with the package of one tree."""

    def __init__(self, case: Case, tree: Path, *, smoke: bool) -> None:
        paths = [str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.error = ""
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", case.name, *(["--smoke"] if smoke else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    def ask(self, seconds: float) -> dict[str, Any] | None:
        """Measure for this long; None after an error."""
        if self.error or self._process.stdin is None:
            return None
        try:
            print(seconds, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self.error = self.error or "the process has ended"
            return None
        return self.answer()

    def answer(self) -> dict[str, Any] | None:
        if self.error or self._process.stdout is None:
            return None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                self.error = found.get("error", "")
                return None if self.error else found
        self.error = f"the process ended with status {self._process.wait()}"
        return None

    def end(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _report(results: list[dict[str, Any]], trees: dict[str, Path]) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    commits = {side: _commit(tree) for side, tree in trees.items()}
    return {"device": gpu, "torch": torch.__version__, "commits": commits, "results": results}


def _commit(tree: Path) -> str:
    asked = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip() or tree.name


def _table(results: list[dict[str, Any]]) -> str:
    lines = ["| case | old tokens/s | new tokens/s | new / old | goal |", "|---|---|---|---|---|"]
    for result in results:
        if "error" in result:
            lines.append(f"| {result['case']} | failed: {result['error']} | | | |")
            continue
        old, new = (f"{result['medians'][side]:,.0f}" for side in ("old", "new"))
        lines.append(f"| {result['case']} | {old} | {new} | {result['ratio']:.3f} | {result['goal']:.2f} |")
    return "\n".join(lines)


# The functions below run in the workers, with the package of one of the trees.


def work(case: Case, *, smoke: bool) -> None:
    """Prepare the model. Then read seconds from each line of standard input and print the measured speed."""
    try:
        measure = _decoding(case, smoke) if case.decodes else _training(case, smoke)
    except Exception as problem:
        print(
            json.dumps({"error": f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"}),
            flush=True,
        )
        raise
    print(json.dumps({"ready": case.name}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"tokens_per_second": measure(float(line))}), flush=True)


def _config(case: Case, smoke: bool) -> Any:
    from longspan import recipes
    from longspan.config import RunConfig, schema

    table = recipes.load(case.recipe)
    training = table["training"]
    for name in ("segment_length", "passage_length", "block_jitter", "compile_warmup", "rehearsal"):
        training.pop(name, None)
    training |= {"batch_size": case.batch_size, "block_length": case.block_length, "micro_batches": 1}
    on_gpu = case.device == "cuda"
    training |= {"precision": "bf16" if on_gpu else "float32", "compile": on_gpu}
    if smoke:
        training |= {"batch_size": 2, "block_length": 16, "precision": "float32", "compile": False}
        model = table["model"]
        model |= {name: value for name, value in SMALL.items() if name in model}
        if "span" in model:
            model["span"] |= {name: 64 for name in ("limit", "limit_shortest") if name in model["span"]}
    return schema.read(RunConfig, table)


def _model(case: Case, config: Any) -> Any:
    import torch

    from longspan.bench.spans import set_profile
    from longspan.models import build_run

    torch.manual_seed(0)
    device = torch.device(case.device if torch.cuda.is_available() else "cpu")
    model = build_run(config, case.vocabulary_size).to(device)
    if case.spans == "profile":
        set_profile(model, case.name)
    return model


def _training(case: Case, smoke: bool) -> Callable[[float], float]:
    from longspan.bench.training import Training

    config = _config(case, smoke)
    model = _model(case, config)
    device = next(model.parameters()).device
    *_, fast = _paths_for()(model, device)
    if config.training.compile:
        model.compile()
    step = Training(model, config, fast).step
    for _ in range(WARM_UPS):
        step()
    tokens = config.training.batch_size * config.training.block_length
    return _back_to_back(step, device, tokens)


def _back_to_back(step: Callable[[], object], device: Any, tokens: int) -> Callable[[float], float]:
    """Tokens per second of back-to-back steps: the host does not synchronise between them."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds_of(times: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(times):
            step()
        wait()
        return (time.perf_counter() - start) / times

    def measure(seconds: float) -> float:
        times = max(3, math.ceil(seconds / seconds_of(3)))
        return tokens / seconds_of(times)

    return measure


def _decoding(case: Case, smoke: bool) -> Callable[[float], float]:
    """One text, token by token; every token is copied to the host before it is read."""
    import torch

    from longspan.generation import Decoder

    model = _model(case, _config(case, smoke)).eval()
    device = next(model.parameters()).device
    with torch.no_grad():
        prompt_BT = torch.randint(case.vocabulary_size, (DECODING_BATCH, PROMPT), device=device)
        _, state = model(prompt_BT, model.initial_state(DECODING_BATCH))
    decoder = Decoder(model, state)
    token_B1 = torch.zeros(DECODING_BATCH, 1, dtype=torch.long, device=device)

    def step() -> None:
        nonlocal token_B1
        token_B1 = decoder.read(token_B1).cpu().argmax(-1, keepdim=True).to(device)

    for _ in range(WARM_UPS):
        step()
    return _back_to_back(step, device, DECODING_BATCH)


def _paths_for() -> Callable[[Any, Any], Any]:
    """`paths_for`, or the function and module that older trees have instead."""
    for module, name in (("bench_paths", "paths_for"), ("bench_paths", "ways_for"), ("ways", "ways_for")):
        try:
            found: Callable[[Any, Any], Any] = getattr(
                importlib.import_module(f"longspan.bench.{module}"), name
            )
        except (ModuleNotFoundError, AttributeError):
            continue
        return found
    raise SystemExit("compare_commits: this tree has no longspan.bench.bench_paths")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [case.name for case in CASES]
    parser.add_argument("--old", type=Path, help="checkout of the old version")
    parser.add_argument(
        "--new", type=Path, default=ROOT, help="checkout of the new version (default: this one)"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=names,
        default=[case.name for case in CASES if case.device == "cuda"],
        metavar="NAME",
        help=f"{', '.join(names)} (default: those of a GPU)",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of steps per turn (default: 4)")
    parser.add_argument("--turns", type=int, default=2, help="turns of each tree (default: 2)")
    parser.add_argument(
        "--memory", type=float, default=110.0, help="GB of GPU memory to use at a time (default: 110)"
    )
    parser.add_argument("--json", type=Path, help="write all results to a new file")
    parser.add_argument("--smoke", action="store_true", help="tiny models, to test this script on a CPU")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
