"""examples/slurm/train.sh, on a Slurm cluster of two nodes on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from tests.cluster.slurm import Slurm, slurm, until
from tests.training.runs import metrics, small_table, write_text

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sh"
STEPS = 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)  # munged accepts a socket only in a folder that everybody may read
    with slurm(folder) as running:
        yield running


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    table = small_table(write_text(tmp_path))
    table["stage"] = [{"steps": STEPS, "learning_rate": 0.01}]
    table["training"] |= {"log_every": 1, "evaluate_every": 0, "checkpoint_every": 0}
    path = tmp_path / "small.toml"
    path.write_text(tomli_w.dumps(table))
    return path


def submit(cluster: Slurm, recipe: Path, run: Path) -> tuple[str, Path]:
    log = run.with_suffix(".log")
    words = [f"--output={log}", "--nodes=2", "--time=10", str(SCRIPT), str(recipe), "--out", str(run)]
    return cluster.call("sbatch", "--parsable", *words), log


def wait_for_end(cluster: Slurm, job: str, log: Path) -> None:
    ends = ("COMPLETED", "FAILED", "TIMEOUT")
    until(lambda: cluster.job(job)["JobState"] in ends, "the job does not end", seconds=300)
    assert cluster.job(job)["JobState"] == "COMPLETED", log.read_text()


def test_a_signalled_job_saves_and_continues_after_requeue(cluster: Slurm, recipe: Path) -> None:
    whole, run = recipe.parent / "whole", recipe.parent / "stopped"
    job, log = submit(cluster, recipe, whole)
    wait_for_end(cluster, job, log)
    assert "2 processes" in log.read_text()

    job, log = submit(cluster, recipe, run)
    until(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) >= STEPS // 10, "no steps", 300)
    cluster.call("scancel", "--batch", "--signal=TERM", job)  # as Slurm does before the end of the time
    until(lambda: cluster.job(job)["JobState"] == "PENDING", "the job was not requeued")
    stopped_at = len(metrics(run))
    assert STEPS // 10 <= stopped_at < STEPS
    # Slurm would wait two minutes. In the same second it refuses to start the job again.
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    wait_for_end(cluster, job, log)
    said = log.read_text()
    assert "stopped by SIGTERM" in said
    assert f"continuing {run} after step {stopped_at}" in said
    assert [_timeless(line) for line in metrics(run)] == [_timeless(line) for line in metrics(whole)]


def _timeless(line: dict[str, object]) -> str:
    times = ("seconds", "tokens_per_second")
    return json.dumps({name: value for name, value in line.items() if name not in times})
