"""Twenty kills of a run with two stages, and of a search: the end is that of an undisturbed one, bit for bit.

`make test-faults` runs this; it takes minutes. The command is always the same, with --or-resume. The seed
fixes the signals and the steps after which they are sent; the exact moments differ from machine to machine.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.search.searches import search_table
from tests.training.runs import outcome, small_table, write_text

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800), pytest.mark.usefixtures("hangups")]

KILLS = 20
STAGES = (130, 90)  # steps
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGHUP: 129}


def recipe_of(command: str, folder: Path) -> Path:
    text = write_text(folder)
    table: dict[str, Any] = small_table(text) if command == "train" else search_table(text)
    table["name"] = "run"
    table["training"] |= {"log_every": 1, "evaluate_every": 20, "checkpoint_every": 7}
    for stage, steps in zip(table["stage"], STAGES, strict=True):
        stage["steps"] = steps
    path = folder / f"{command}.toml"
    path.write_text(tomli_w.dumps(table))
    return path


class Life:
    """One process that trains, and the newest step that it has logged."""

    def __init__(self, command: str, recipe: Path, run: Path) -> None:
        run.parent.mkdir(exist_ok=True)
        words = [sys.executable, "-m", "longspan", command, str(recipe), "--out", str(run), "--or-resume"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.step, self.lines = 0, list[str]()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if (found := re.search(r"\bstep ([\d,]+)", line)) and not line.startswith("continuing"):
                self.step = int(found[1].replace(",", ""))

    def wait_for(self, step: int) -> None:
        while self.step < step and self.process.poll() is None:
            time.sleep(0.001)

    def end(self) -> tuple[int, str]:
        status = self.process.wait(timeout=300)
        self._reader.join()
        return status, "".join(self.lines)


@pytest.mark.parametrize("command", ["train", "search"])
def test_twenty_kills(command: str, tmp_path: Path) -> None:
    recipe = recipe_of(command, tmp_path)
    status, said = Life(command, recipe, tmp_path / "whole" / "run").end()
    assert status == 0, said

    draw, run = random.Random(21), tmp_path / "killed" / "run"
    numbers = [SIGNALS[kill % len(SIGNALS)] for kill in range(KILLS)]
    draw.shuffle(numbers)
    steps = sorted(draw.sample(range(1, sum(STAGES) - 10), KILLS - 3))
    moments = [0, 0, 3, *steps[1:], sum(STAGES)]  # while it starts, between steps, in the final scoring
    ended = Counter[int]()
    for number, step in zip(numbers, moments, strict=True):
        life = Life(command, recipe, run)
        life.wait_for(step)
        time.sleep(draw.uniform(0.5, 4.0) if step == 0 else draw.uniform(0.0, 0.03))
        life.process.send_signal(number)
        status, said = life.end()
        # Before the first step a signal has its usual effect.
        assert status in (ENDS[number], -number), f"{status} instead of {ENDS[number]} at step {step}: {said}"
        ended[number] += 1
    assert sum(ended.values()) == KILLS
    assert min(ended[number] for number in SIGNALS) >= KILLS // len(SIGNALS)

    status, said = Life(command, recipe, run).end()
    assert status == 0, said
    assert outcome(run) == outcome(tmp_path / "whole" / "run")
