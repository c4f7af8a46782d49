"""Compares models by their test loss after the same training time on the same bytes.

    python benchmarks/race.py flagship gpt x-transformers-4096 [--seconds 220] [--seed 1,2,3] [--part valid]
                              [--out FOLDER [--weights]] [--OPTION=VALUE]

Entrants are recipes (names or TOML files) and x-transformers with a context length. Dotted options, written
with "=", apply to all recipes; an entrant with options of its own is a TOML file. Compilation and graph
capture before the first step are not counted as training time. Prints one JSON line per training, and a
summary after several seeds; docs/race.md describes their fields.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import longspan
import race_corpus
import race_protocol
import race_summary
import race_x_transformers
from longspan import recipes
from longspan.bench.machine import watch_memory
from longspan.cli.overrides import apply, split_overrides
from longspan.config import DataConfig, EvaluationConfig, GptConfig, ModelConfig, RunConfig, schema
from longspan.data import TokenizedCorpus, prepare
from longspan.errors import UserError
from longspan.files import whole_folder
from longspan.models import LanguageModel, build_run
from longspan.models.skeleton import skeletons
from longspan.runs import pick_device
from longspan.runs.environment import environment
from longspan.training import Interrupted, Reporter, train
from longspan.training.strategy import Strategy

LANES = 16
WARMUP = 8
BYTES = 256
NO_END = 10**9  # steps: a stage ends by its time limit
OURS = [
    ("training", name)
    for name in ("seed", "device", "evaluate_every", "checkpoint_every", "checkpoint_minutes", "patience")
]
LOGS = ("config.toml", "environment.json", "metrics.jsonl", "spans.jsonl")


def main(argv: Sequence[str] | None = None) -> int:
    args, dotted = _parser().parse_known_args(argv)
    try:
        if loose := [word for word in dotted if "=" not in word]:
            raise UserError(f"options of recipes are written with '=', as in {loose[0]}=VALUE")
        race(args, split_overrides(dotted))
    except UserError as problem:
        print(f"race: {problem}", file=sys.stderr)
        return 1
    except Interrupted as stop:
        print(f"race: {stop}; the training in progress is lost", file=sys.stderr)
        return stop.exit_status
    except KeyboardInterrupt:  # before a training, or while it is scored
        print("race: stopped; results that were not printed are lost", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def race(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    device = pick_device(args.device)
    if args.bytes is not None and args.bytes < 1:
        raise UserError(f"--bytes must be at least 1, not {args.bytes}")
    if not 0 < args.seconds < math.inf:
        raise UserError(f"--seconds must be a number above 0, not {args.seconds:g}")
    seeds = race_summary.seeds_of(args.seed)
    _check_not_ours(overrides)
    if args.weights and args.out is None:
        raise UserError("--weights needs --out, a folder to keep them in")
    entrants = [_entrant(name, overrides, args) for name in args.entrants]
    if args.out is not None:
        configs = [config for config in entrants if isinstance(config, RunConfig)]
        _check_logs([_logs(config, seed, args.out) for config in configs for seed in seeds])
        _make_folder(args.out)
    folder = race_corpus.written(args.corpus, pattern=args.files, num_bytes=args.bytes, part=args.part)
    data = DataConfig(corpus=str(folder), binary=True)
    corpus = prepare(data)
    for entrant in entrants:
        readings, _ = _readings(entrant, len(corpus.splits["test"]))
        race_protocol.check_reach(readings, len(corpus.splits["valid"]))
        if isinstance(entrant, int) and len(corpus.splits["train"]) <= entrant:
            raise UserError(f"the training text is not longer than a context of {entrant:,}: use more text")
    runs: list[list[dict[str, Any]]] = [[] for _ in entrants]
    for seed in seeds:  # a machine that slows down meets all entrants alike
        for entrant, lines in zip(entrants, runs, strict=True):
            torch.compiler.reset()  # else earlier entrants count against the limit of recompilations
            peak = watch_memory(device)
            if isinstance(entrant, int):
                found = race_x_transformers.run(
                    entrant, corpus, seconds=args.seconds, seed=seed, device=device, peak=peak
                )
            else:
                training = replace(entrant.training, seed=seed)
                config = replace(entrant, data=data, training=training)
                found = run_recipe(config, corpus, device, args.out, peak, weights=args.weights)
                found["changed"] = dict(overrides)
            lines.append(_result({"seed": seed, "part": args.part, **found}, corpus, device))
            print(race_summary.readable(lines[-1]), file=sys.stderr, flush=True)
            _write(lines[-1], args.out, "race.jsonl")
    if len(seeds) > 1:
        _write(race_summary.summary(runs, args.part), args.out, "summary.jsonl")


def _entrant(name: str, overrides: list[tuple[str, str]], args: argparse.Namespace) -> RunConfig | int:
    """A recipe, or the context of x-transformers; all are checked before the first one starts."""
    if name.startswith(race_x_transformers.PREFIX):
        return race_x_transformers.context_of(name)
    return _config(name, overrides, args)


def _check_not_ours(overrides: list[tuple[str, str]]) -> None:
    """Raise `UserError` for options that the race sets for all entrants."""
    for name, _ in overrides:
        section, _, last = name.replace("-", "_").rpartition(".")
        if (
            section.split(".")[0] in ("data", "evaluation")
            or (section, last) in OURS
            or last == "max_seconds"
        ):
            raise UserError(f"--{name} is set by the race: see --help for its own options")


def _check_logs(logs: list[Path]) -> None:
    for place in logs:
        if place.exists():
            raise UserError(f"{place} exists already: give another --out, --seed or --name=NAME")
        if logs.count(place) > 1:
            raise UserError(f"two entrants would write {place}: run them one by one, each with --name=NAME")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"--out must be a folder: {problem}") from None


def _config(recipe: str, overrides: list[tuple[str, str]], args: argparse.Namespace) -> RunConfig:
    """The recipe with the race's settings: bytes, time limit, no evaluations during training."""
    table = recipes.load(recipe)
    apply(table, overrides)
    config = schema.read(RunConfig, table)
    Strategy.check(config)
    with skeletons():
        build_run(config, BYTES)  # raises if the model cannot be built for bytes
    steps = [stage.steps for stage in config.stage if stage.steps is not None]
    if len(steps) < len(config.stage):
        raise UserError(f"{recipe} has a stage of epochs: the race divides its time by steps, so give steps")
    return replace(
        config,
        data=DataConfig(),
        evaluation=EvaluationConfig(max_tokens=65_536, max_tokens_final=65_536),
        training=replace(
            config.training,
            device=args.device,
            evaluate_every=0,
            checkpoint_every=0,
            checkpoint_minutes=0,
            patience=0,
            compile_warmup=config.training.compile_warmup or WARMUP,
        ),
        stage=tuple(
            replace(stage, max_seconds=args.seconds * own / sum(steps), steps=NO_END)
            for stage, own in zip(config.stage, steps, strict=True)
        ),
    )


def run_recipe(
    config: RunConfig,
    corpus: TokenizedCorpus,
    device: torch.device,
    out: Path | None,
    peak: Callable[[], int | None],
    *,
    weights: bool = False,
) -> dict[str, Any]:
    """Train as `longspan train` does, score, and return the results. `out` keeps logs, or `weights` too."""
    with tempfile.TemporaryDirectory(prefix="longspan-race-") as place:
        run = train(config, Path(place) / "run", reporter=_Aside())
        peak_memory_bytes = peak()
        lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
        *_, last = (line for line in lines if line["kind"] == "train")
        model = longspan.load(run.path, device=str(device)).model
        if out is not None:
            _keep(run.path, _logs(config, config.training.seed, out), weights)
    test = corpus.splits["test"].tokens
    readings, block_length = _readings(config, len(test))
    nats = race_protocol.nats(
        _reader(model),
        corpus.splits["valid"].tokens,
        test,
        readings,
        batch_size=LANES,
        block_length=block_length,
        device=device,
    )
    return {
        "name": config.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": last["seconds"],
        "steps": last["step"],
        "tokens": last["tokens"],
        "peak_memory_bytes": peak_memory_bytes,
        "nats": nats,
        "look_back": look_back(config.model),
        "scored_in": "windows" if isinstance(config.model, GptConfig) else "streams",
        "config": _digest(config),
        **_spans(model),
    }


def _readings(entrant: RunConfig | int, num_bytes: int) -> tuple[list[race_protocol.Reading], int]:
    """How a test split of this many bytes is read, and the block length."""
    if isinstance(entrant, int):
        return race_protocol.windows(num_bytes, entrant), entrant
    back, block_length = look_back(entrant.model), entrant.training.block_length
    if isinstance(entrant.model, GptConfig):
        return race_protocol.windows(num_bytes, back), back
    return race_protocol.streams(num_bytes, LANES, max(back, block_length)), block_length


def look_back(model: ModelConfig) -> int:
    """How far back a layer can attend, in tokens."""
    if isinstance(model, GptConfig):
        return model.context
    span = getattr(model, "span", None)
    back: int | None = getattr(model, "memory_length", None) if span is None else span.limit
    if back is None:
        raise UserError(
            f"how far back {type(model).__name__} can attend is not known: "
            "its options need span or memory_length"
        )
    return back


def _reader(model: LanguageModel) -> race_protocol.Read:
    def read(tokens_BT: Tensor, targets_BT: Tensor, state: Any) -> tuple[Tensor, Any]:
        state = model.initial_state(tokens_BT.shape[0]) if state is None else state
        hidden_BTD, state = model(tokens_BT, state)
        return model.head.nll(hidden_BTD, targets_BT), state

    return read


def _spans(model: LanguageModel) -> dict[str, Any]:
    seen = model.diagnostics()
    if "spans_LH" not in seen:
        return {}
    spans_LH = seen["spans_LH"].float()
    return {
        "spans": {
            "limit": model.records()["spans"]["limit"],
            "mean": float(spans_LH.mean()),
            "longest": float(spans_LH.max()),
            "mean_of_layers": [round(mean, 1) for mean in spans_LH.mean(1).tolist()],
            "longest_of_layers": [round(longest, 1) for longest in spans_LH.amax(1).tolist()],
        }
    }


def _digest(config: RunConfig) -> str:
    """A hash of the configuration without data, seed and device."""
    table = schema.write(config)
    del table["data"], table["training"]["seed"], table["training"]["device"]
    return hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=8).hexdigest()


def _result(found: dict[str, Any], corpus: TokenizedCorpus, device: torch.device) -> dict[str, Any]:
    num_bytes = len(corpus.splits["test"])
    return found | {
        "bytes": num_bytes,
        "bits_per_byte": found["nats"] / math.log(2) / num_bytes,
        "tokens_per_second": found["tokens"] / found["seconds"],
        "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint}
        | {f"{split}_bytes": len(tokens) for split, tokens in corpus.splits.items()},
        "environment": environment(device),
    }


def _write(found: dict[str, Any], out: Path | None, name: str) -> None:
    line = json.dumps(found)
    print(line, flush=True)
    if out is not None:
        with (out / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _logs(config: RunConfig, seed: int, out: Path) -> Path:
    return out / f"{config.name}-seed{seed}"


def _keep(run: Path, place: Path, weights: bool) -> None:
    with whole_folder(place) as partial:
        if weights:
            shutil.copytree(run, partial, dirs_exist_ok=True)
            return
        for name in LOGS:
            if (run / name).is_file():
                shutil.copy(run / name, partial)


class _Aside(Reporter):
    """Prints to standard error: standard output is for results."""

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def log(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _path(text: str) -> Path:
    if not text:  # a variable of the shell that is not set
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("entrants", nargs="+", metavar="ENTRANT", help="a recipe, or x-transformers-1024")
    parser.add_argument(
        "--corpus",
        type=_path,
        default=Path(sysconfig.get_path("purelib")),
        help="a folder or a file (default: the installed packages)",
    )
    parser.add_argument("--files", help=f"pattern for the files of a folder (default: {race_corpus.FILES})")
    parser.add_argument(
        "--bytes",
        type=int,
        help=f"number of bytes to use, from the start (default: {race_corpus.BYTES:,})",
    )
    parser.add_argument("--seconds", type=float, default=220.0, help="training time")
    parser.add_argument("--seed", default="1", metavar="N[,N...]", help="one or several, as in 1,2,3")
    parser.add_argument(
        "--part",
        choices=race_corpus.PARTS,
        default="test",
        help="score the test, or the second half of the valid part: for screens, which never read the test",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--out",
        type=_path,
        help="folder for race.jsonl, summary.jsonl (lines are appended) and logs",
    )
    parser.add_argument(
        "--weights", action="store_true", help="with --out: keep whole run folders, for 'longspan eval'"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
