"""Two agents of torchrun on this machine, as on two nodes: they meet at an address and train one run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from longspan.config import RunConfig, schema
from longspan.training import train
from tests.training.runs import metrics, small_table, write_text

from .test_training import assert_same

pytestmark = pytest.mark.distributed


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_two_nodes_train_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_HOME", str(tmp_path / "home"))
    text = write_text(tmp_path)
    table = small_table(text)
    table["model"]["dropout"] = 0.0
    table["training"] |= {"block_jitter": False, "micro_batches": 1, "log_every": 1, "evaluate_every": 4}
    table["stage"] = [{"steps": 8, "learning_rate": 0.01}]
    (tmp_path / "small.toml").write_text(tomli_w.dumps(table))
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=2", "--nproc-per-node=1", "--local-addr=127.0.0.1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=two-nodes"),
    ]
    command = ["-m", "longspan", "train", str(tmp_path / "small.toml"), "--out", str(tmp_path / "two")]
    nodes = [
        subprocess.Popen(
            [*torchrun, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    printed, errors = zip(*(node.communicate(timeout=120) for node in nodes), strict=True)
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert sorted("run folder" in said for said in printed) == [False, True]  # one of them has rank 0
    assert metrics(tmp_path / "two")[-1]["kind"] == "final"

    train(schema.read(RunConfig, table), tmp_path / "one")
    assert_same(tmp_path / "two", tmp_path / "one")
