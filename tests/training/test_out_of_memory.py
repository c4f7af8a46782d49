"""Too little memory: numbers before the first step, and one line of advice instead of a traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from longspan.bench import measure
from longspan.cli import main
from longspan.config import RunConfig
from longspan.errors import UserError
from longspan.models import build_run
from longspan.runs import checkpoint
from longspan.runs.auto_options import resolved
from longspan.training import out_of_memory, resume, scoring, train
from longspan.training.activations import Activations, Line
from longspan.training.formatting import size
from longspan.training.memory_plan import measured_for, memory_plan
from longspan.training.out_of_memory import advice, within_memory
from longspan.training.step import Updater

from .runs import Lines, metrics, outcome, small_config, small_table
from .tiny import TinyModel

GIB = 2**30
NUMBER = r"[\d.]+ [KMG]iB"
PARTS = f"weights {NUMBER}, gradients {NUMBER}, optimizer {NUMBER}, activations {NUMBER}, carried state"


@pytest.fixture
def recipe(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(tomli_w.dumps(small_table(text)))
    return "small.toml"


def fail_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is full at this update."""
    update, calls = Updater.update, 0

    def full(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return update(*args, **kwargs)

    monkeypatch.setattr(Updater, "update", full)


class TestBeforeTheFirstStep:
    def test_a_run_says_what_a_step_needs(self, text: Path, tmp_path: Path) -> None:
        lines = Lines()
        train(small_config(text, stage__0__steps=1, stage__1__steps=1), tmp_path / "run", reporter=lines)
        (line,) = (line for line in lines.lines if line.startswith("memory"))
        assert re.fullmatch(rf"memory for a step: about {NUMBER} \({PARTS} {NUMBER}\)", line)
        assert line in (tmp_path / "run/log.txt").read_text()

    def test_a_dry_run_says_the_same(self, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["train", recipe, "--dry-run", "--json"]) == 0
        told = capsys.readouterr()
        found = json.loads(told.out)["memory_bytes"]
        config = resolved(RunConfig.from_toml(Path(recipe).read_bytes(), recipe), torch.device("cpu"))
        model = build_run(config, 256)
        plan = memory_plan(model, config, measured_for(model, config))
        assert found.pop("total") == plan.total
        assert found == vars(plan)
        assert f"memory for a step: about {plan}" in told.err
        assert main(["train", recipe, "--dry-run"]) == 0
        assert f"memory         about {size(plan.total)} for a step" in capsys.readouterr().out

    def test_a_dry_run_on_a_cpu_does_not_try(
        self, recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Linux may kill a process that needs more than there is."""
        for module in (out_of_memory, measure):
            monkeypatch.setattr(module, "available_memory", lambda model: 250 * 1024)
        assert main(["train", recipe, "--dry-run"]) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("longspan: out of memory: a step needs about")
        assert "250 KiB were free: training.micro_batches = " in last

    def test_too_little_is_said_and_the_run_tries(
        self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(out_of_memory, "available_memory", lambda model: 250 * 1024)
        lines = Lines()
        config = small_config(text, stage__0__steps=1, stage__1__steps=1)
        train(config, tmp_path / "run", reporter=lines)
        (line,) = (line for line in lines.lines if line.startswith("that is more than the 250 KiB"))
        assert "training.micro_batches = " in line
        assert metrics(tmp_path / "run")[-1]["kind"] == "final"

    def test_results_do_not_depend_on_the_estimate(
        self, text: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unmeasured(*_: Any) -> Any:
            raise MemoryError

        monkeypatch.setattr(out_of_memory, "measured_for", unmeasured)
        assert outcome(train(small_config(text), tmp_path / "run").path) == outcome(uninterrupted)


class TestInAStep:
    def test_one_line_and_the_checkpoint_stays(
        self,
        recipe: str,
        uninterrupted: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        with monkeypatch.context() as patch:
            fail_at(13, patch)
            assert main(["train", recipe, "--out", "run"]) == 1
        (complaint,) = capsys.readouterr().err.splitlines()
        assert re.match(rf"longspan: out of memory: a step needs about {NUMBER} \({PARTS}", complaint)
        assert re.search(rf"training\.micro_batches = \d would need about {NUMBER}", complaint)
        assert "training.activation_checkpointing = true " in complaint
        assert complaint.endswith("continue with 'longspan train --resume run' and the changed option")
        assert checkpoint.load(Path("run/checkpoints/last.safetensors")).facts["progress"]["step"] == 10
        # What it advises is enough to go on; checkpointing changes no number.
        assert main(["train", "--resume", "run", "--training.activation-checkpointing", "true"]) == 0
        assert outcome(Path("run")) == outcome(uninterrupted)

    def test_other_failures_keep_their_traceback(
        self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("a bug")

        monkeypatch.setattr(Updater, "update", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            train(small_config(text), tmp_path / "run")

    def test_a_real_limit(self, recipe: str) -> None:
        """Address space for half of what a step needs, and the system refuses the rest."""
        pytest.importorskip("resource")
        program = (
            "import re, resource, sys; from pathlib import Path; import longspan.training.run as run\n"
            "loop = run.Loop\n"
            "def limited(*args):\n"
            "    status = Path('/proc/self/status').read_text()\n"
            "    limit = int(re.search(r'VmSize:\\s+(\\d+)', status)[1]) * 1024 + 2**27\n"
            "    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
            "    return loop(*args)\n"
            "run.Loop = limited\n"
            "from longspan.cli import main; sys.exit(main(sys.argv[1:]))\n"
        )
        if not Path("/proc/self/status").exists():
            pytest.skip("only Linux says how much address space a process uses")
        large = ["--training.block-length", "400", "--training.micro-batches", "1", "--model.inner-width"]
        words = ["train", recipe, *large, "30000", "--training.block-jitter", "false", "--quiet"]
        run = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
        assert run.returncode == 1
        assert run.stderr.startswith("longspan: out of memory: a step needs about "), run.stderr


def test_in_evaluation(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(scoring, "evaluate", full)
    with pytest.raises(UserError, match=r"scoring held-out text with 8 lanes of 24 tokens: lower evaluation"):
        train(small_config(text), tmp_path / "run")
    monkeypatch.undo()
    assert checkpoint.load(tmp_path / "run/checkpoints/last.safetensors").facts["progress"]["step"] == 10
    resume(tmp_path / "run")


class TestAdvice:
    """Lanes of 1 GiB, 0.1 GiB with activation checkpointing; the rest of the model is small."""

    MEASURED = Activations(plain=Line(0, GIB), recomputed=Line(0, GIB / 10), state=Line(0, 0))

    def advice(self, gibibytes: float, ranks: int = 1, **training: Any) -> str:
        config = small_config(Path("text.txt"), training__batch_size=16, training__block_jitter=False)
        config = replace(config, training=replace(config.training, **{"micro_batches": 1, **training}))
        model = build_run(config, 30)
        return advice(model, config, self.MEASURED, int(gibibytes * GIB), ranks=ranks)

    def test_each_option_that_is_enough(self) -> None:
        assert self.advice(5) == (
            "training.micro_batches = 4 would need about 4 GiB; training.activation_checkpointing = true "
            "1.6 GiB"
        )
        assert self.advice(5, micro_batches=3) == (
            "training.micro_batches = 6 would need about 3 GiB; training.activation_checkpointing = true "
            "614 MiB"
        )

    def test_both_if_neither_is_enough(self) -> None:
        assert self.advice(0.5) == (
            "training.micro_batches = 4 and training.activation_checkpointing = true would need about 410 MiB"
        )

    def test_nothing_is_enough(self) -> None:
        assert self.advice(0.01) == (
            "training.micro_batches = 16 and training.activation_checkpointing = true would need about "
            "102 MiB, which is still too much: lower training.batch_size, training.block_length or the size "
            "of the model"
        )
        assert self.advice(0.01, micro_batches=16, activation_checkpointing=True) == (
            "lower training.batch_size, training.block_length or the size of the model"
        )

    def test_processes_share_lanes_and_may_share_weights(self) -> None:
        assert "training.micro_batches = 4 would need about 1 GiB; " in self.advice(1.5, ranks=4)
        config = small_config(Path("text.txt"), model__inner_width=200000, training__micro_batches=1)
        model = build_run(config, 30)
        none = Activations(Line(0, 0), None, Line(0, 0))
        before, after = (memory_plan(model, config, none, ranks=4, shard=shard) for shard in (False, True))
        assert advice(model, config, none, after.total, ranks=4) == (
            f"training.shard = true would need about {size(after.total)}"
        )
        assert after.total < 0.9 * before.total


def test_a_model_without_blocks_says_that_checkpointing_has_no_effect(text: Path) -> None:
    config = small_config(text, training__activation_checkpointing=True)
    lines: list[str] = []
    with within_memory(TinyModel(), config, lines.append):
        pass
    assert lines[0] == "training.activation_checkpointing has no effect: TinyModel is not a stack of blocks"
