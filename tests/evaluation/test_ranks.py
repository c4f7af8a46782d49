"""Evaluation divided over the processes of torchrun: the score of one process, on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longspan import distributed
from longspan.cli import main
from tests import forks
from tests.evaluation import cases
from tests.evaluation.cases import CASES, SHARDED, curve, score
from tests.using.tiny import run_folder, tiny_model

ROOT = Path(__file__).parents[2]
TEXT = "".join(f"line {number} of a text that is long enough\n" for number in range(400))
FLOATS = ("nats", "loss", "bits_per_byte", "bits_per_character", "bits_per_token")


def torchrun(processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, *launch, *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": paths},
    )


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """All counts are the same; sums of nats differ by rounding at most."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name in ("by_position", "context_curve"):
            for one, other in zip(found[name], value, strict=True):
                check_same(one, other)
        elif isinstance(value, float):
            assert found[name] == pytest.approx(value, rel=1e-6)
        else:
            assert found[name] == value


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.distributed)])
def test_scores_are_those_of_one_process(processes: int, tmp_path: Path) -> None:
    forks.ranks(processes, cases.main, tmp_path)
    on_ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    assert all(found == on_ranks[0] for found in on_ranks)
    model = tiny_model()
    alone = {name: json.loads(json.dumps(score(model, case))) for name, case in CASES.items()}
    for name, expected in (alone | {f"sharded: {name}": alone[name] for name in SHARDED}).items():
        check_same(on_ranks[0][name], expected)
    for name in ("curve", "sharded: curve"):
        check_same(on_ranks[0][name], json.loads(json.dumps(curve(model))))


@pytest.mark.parametrize("lanes", range(1, 10))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_lane_belongs_to_one_rank(lanes: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "size", lambda: size)
    shares = []
    for rank in range(size):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(distributed.divided(lanes))
    assert [lane for share in shares for lane in share] == list(range(lanes))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.fixture
def run(tmp_path: Path) -> str:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    return str(run_folder(tmp_path / "run", corpus=str(text)).path)


@pytest.mark.distributed
def test_the_command_prints_one_result(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", run, "--json", "--device", "cpu", "--batch-size", "3", "--block-length", "16"]
    assert main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    done = torchrun(2, "-m", "longspan", *words)
    assert done.returncode == 0, done.stderr
    check_same(json.loads(done.stdout), alone)
    assert not [
        line for line in done.stderr.splitlines() if "scoring" in line
    ]  # shorter than a line of progress


@pytest.mark.distributed
def test_a_mistake_of_all_ranks(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "longspan", "eval", str(tmp_path / "nowhere"), "--device", "cpu")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("longspan: ")]
    # torchrun ends rank 1 when rank 0 has failed, unless the machine is so busy that rank 0 takes seconds.
    mistake = f"there is no run folder {tmp_path / 'nowhere'}"
    assert said in ([f"longspan: {named}{mistake}" for named in each] for each in ([""], ["", "rank 1: "]))
    assert "longspan/cli" not in done.stderr  # no traceback of ours, also not in the report of torchrun
    assert "nowhere" in done.stderr.split("Root Cause")[1]
