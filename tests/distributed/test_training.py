"""Several processes train the model that one process trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.runs import checkpoint
from tests.training.runs import write_text

from .cases import CASES, launch, run

QUICK = [("adaptive-span", False), ("flagship", True)]  # name, sharded
ALL = [(name, shard) for name in CASES for shard in (False, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    return write_text(folder)


@pytest.fixture(scope="module", autouse=True)
def home(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGSPAN_HOME", str(folder / "home"))
        yield


def lines(run_folder: Path, kind: str) -> list[dict[str, Any]]:
    metrics = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, metrics) if line["kind"] == kind]


def assert_same(several: Path, one: Path) -> None:
    """Losses, scores, weights, optimizer states and carried states agree to rounding; counters exactly."""
    for kind in ("train", "valid"):
        for ours, theirs in zip(lines(several, kind), lines(one, kind), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5)
            assert ours["step"] == theirs["step"]
            assert ours.get("tokens") == theirs.get("tokens")
    for which in ("last", "best"):
        ours, theirs = (checkpoint.load(run / f"checkpoints/{which}.safetensors") for run in (several, one))
        assert ours.facts["progress"]["position"] == theirs.facts["progress"]["position"]
        named = {name: t for name, t in ours.tensors.items() if not name.startswith("generator_of_rank")}
        assert named.keys() == theirs.tensors.keys()
        for name, tensor in named.items():
            if not name.startswith("generator"):
                torch.testing.assert_close(tensor, theirs.tensors[name], rtol=1e-3, atol=3e-5, msg=name)


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        pytest.param(2, QUICK, id="2"),
        pytest.param(2, ALL, id="2-all", marks=pytest.mark.distributed),
        pytest.param(4, ALL, id="4-all", marks=[pytest.mark.distributed, pytest.mark.faults]),
    ],
)
def test_as_one_process(processes: int, cases: list[tuple[str, bool]], folder: Path, text: Path) -> None:
    place = folder / f"{processes}-{len(cases)}"
    place.mkdir()
    jobs = [
        {"name": name, "text": str(text), "out": str(place / f"{name}-{shard}"), "shard": shard}
        for name, shard in cases
    ]
    launch(processes, place, jobs, torchruns=cases is QUICK)
    for name in dict(cases):
        run(name, text, place / f"{name}-one")
    for name, shard in cases:
        assert_same(place / f"{name}-{shard}", place / f"{name}-one")


def resumed(name: str, folder: Path, text: Path, *ranks: int) -> Path:
    """The folder of a run that was stopped every three steps and continued with the next number of ranks."""
    out = folder / f"{name}-{'-'.join(map(str, ranks))}"
    job = {"name": name, "text": str(text), "out": str(out)}
    for part, processes in enumerate(ranks):
        last = part + 1 == len(ranks)
        more = {"again": part > 0, "stop_at": None if last else 3 * (part + 1), "shard": processes > 2}
        if processes == 1:
            run(name, text, out, **more)
        else:
            launch(processes, folder, [job | more])
    return out


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("flagship", (4, 2)),
        ("search", (2, 4, 1)),
        pytest.param("adaptive-span", (2, 4, 1), marks=pytest.mark.faults),
        pytest.param("transformer-xl", (1, 2, 4), marks=pytest.mark.faults),
        pytest.param("sha-rnn", (4, 2, 1), marks=pytest.mark.faults),
    ],
)
def test_another_number_of_ranks(name: str, ranks: tuple[int, ...], tmp_path: Path, text: Path) -> None:
    run(name, text, tmp_path / "one")
    assert_same(resumed(name, tmp_path, text, *ranks), tmp_path / "one")
