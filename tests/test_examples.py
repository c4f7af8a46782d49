"""The examples, used as a stranger would: the package is installed, they are not, and commands are typed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from longspan.cli import main
from longspan.testing import check_model

from .training.runs import metrics, outcome, write_text

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
QUICK = ["--training.batch-size", "4", "--training.checkpoint-every", "10", "--stage.0.steps", "150"]
QUICK += ["--training.evaluate-every", "75", "--evaluation.max-tokens", "500"]
QUICK += ["--evaluation.max-tokens-final", "500"]


class Installed:
    """The package in a folder of its own, and commands that see this folder and the examples."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder, folder / "site"
        source = folder / "source"  # a build leaves files in the folder that it builds from
        shutil.copytree(
            ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", self.site]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *options, source], check=True)

    def start(self, *words: object, program: object = "bin/longspan") -> subprocess.Popen[str]:
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.site), str(EXAMPLES)]),
            "LONGSPAN_HOME": str(self.folder / "home"),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [sys.executable, self.site / str(program), *map(str, words)],
            cwd=self.folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *words: object, program: object = "bin/longspan") -> str:
        process = self.start(*words, program=program)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        return out


def test_the_recurrence_is_its_equation(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """m_t = a_t * m_(t-1) + (1 - a_t) * v_t, step by step, and gradients too."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from own_block import scan

    a_BTM = torch.rand(2, 37, 3, dtype=torch.double, requires_grad=True)
    v_BTM = torch.randn(2, 37, 3, dtype=torch.double, requires_grad=True)
    m_BM = start_BM = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    wanted = []
    for t in range(37):
        m_BM = a_BTM[:, t] * m_BM + (1 - a_BTM[:, t]) * v_BTM[:, t]
        wanted.append(m_BM)
    wanted_BTM = torch.stack(wanted, dim=1)
    decay_BTM, new_BTM = scan(a_BTM, (1 - a_BTM) * v_BTM)
    found_BTM = decay_BTM * start_BM[:, None] + new_BTM
    assert torch.allclose(found_BTM, wanted_BTM, rtol=0, atol=1e-13)
    weights_BTM = torch.randn_like(found_BTM)
    inputs = (a_BTM, v_BTM, start_BM)
    for found, expected in zip(
        torch.autograd.grad((found_BTM * weights_BTM).sum(), inputs),
        torch.autograd.grad((wanted_BTM * weights_BTM).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_own_block_is_short() -> None:
    assert len((EXAMPLES / "own_block.py").read_text().splitlines()) < 90


def test_own_block_keeps_the_contract(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from own_block import GatedConfig, gated

    check_model(gated(GatedConfig(num_layers=2, width=8), 11))


def test_own_block_is_timed(
    own_registry: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("longspan.bench.measure.matrix_rate", lambda *_: 1e9)  # it takes seconds
    recipe = str(EXAMPLES / "own_block.toml")
    assert main(["bench", recipe, "--steps", "1", "--batch-size", "1", "--decode"]) == 0
    assert "own-block: decodes " in capsys.readouterr().out


@pytest.mark.slow
def test_own_block_from_outside(tmp_path: Path) -> None:
    """Train by a recipe that names the plugin; kill and resume; evaluate, generate, load in Python."""
    installed = Installed(tmp_path)
    words = ["train", EXAMPLES / "own_block.toml", "--data", write_text(tmp_path), *QUICK]
    installed.run(*words, "--name", "whole", "--out", "whole")
    killed = installed.start(*words, "--name", "whole", "--out", "killed")
    while not (tmp_path / "killed/checkpoints/last.safetensors").exists() and killed.poll() is None:
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert '"final"' not in (tmp_path / "killed/metrics.jsonl").read_text()
    installed.run("train", "--resume", "killed")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")

    score = json.loads(installed.run("eval", "killed", "--json", "--max-tokens", "500"))
    assert score["loss"] == pytest.approx(metrics(tmp_path / "whole")[-1]["test"]["loss"], rel=1e-6)
    assert score["loss"] < 2.5  # of 256 bytes: ln(256) = 5.5 before training
    written = installed.run("generate", "killed", "--prompt", "the cat", "--seed", "1", "--tokens", "40")

    script = tmp_path / "use.py"
    script.write_text(
        "import json, longspan\n"
        "from longspan.testing import check_model\n"
        "lm = longspan.load('killed', device='cpu')\n"
        "check_model(lm.model)\n"
        "model = lm.config.model\n"
        "found = [longspan.__file__, type(model).__name__, model.recurrence.expand, lm.config.plugins]\n"
        "print(json.dumps([*found, lm.generate('the cat', tokens=40, seed=1)]))\n"
    )
    place, *found, text = json.loads(installed.run(program=script))
    assert Path(place).is_relative_to(installed.site)
    assert found == ["GatedConfig", 2, ["own_block"]]
    assert written.rstrip("\n") == f"the cat{text}".rstrip("\n")
