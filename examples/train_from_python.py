"""Train a small model on a text of your own, and use it: all from Python, in seconds on a CPU.

    python examples/train_from_python.py [FOLDER]

The run folder goes into FOLDER, by default into a new temporary one.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from pathlib import Path
from typing import Any

import longspan


def main(folder: Path) -> None:
    # Any text will do; this one every Python has.
    source = inspect.getsource(argparse)
    text = folder / "argparse.txt"
    text.write_text(source, encoding="utf-8")

    # Train: a recipe, the text, and the options to change, with __ for the dots of their names.
    def show(line: dict[str, Any]) -> bool | None:
        print(f"step {line['step']:>3} {line['kind']:<5} loss {line['loss']:.3f}")
        return False if line["loss"] < 0.5 else None  # False would stop here, with everything saved

    run = longspan.train(
        "quickstart",
        data=text,
        out=folder / "run",
        callback=show,
        model__num_layers=2,
        model__width=64,
        model__inner_width=256,
        model__span__limit=128,
        training__batch_size=16,
        training__device="cpu",
        stage__0__steps=50,
        stage__0__max_seconds=None,
    )
    assert run.final is not None
    print(f"\n{run.path}: {run.final['test']['bits_per_byte']:.3f} bits per byte on the test split")

    # Evaluate: the same number again, or any other split, text or protocol.
    score = longspan.evaluate(run, split="valid", protocol="transformer-xl")
    print(f"{score.bits_per_byte:.3f} bits per byte on the validation split, by {score.protocol}")

    # Score a text: nats of every token.
    lm = run.load()
    cost = lm.score("def parse_args(self, args=None):\n")
    least_likely = max(zip(cost.token_nats, cost.pieces, strict=True))
    print(
        f"{cost.bits_per_byte:.2f} bits per byte; "
        f"the least likely token is {least_likely[1]!r}, {least_likely[0]:.1f} nats"
    )

    # Read a long text into a state, whose size is constant. Continue from the state any number of times.
    state = lm.read(source[:20_000])
    for seed in (1, 2):
        text = lm.generate(tokens=60, seed=seed, state=state)
        print(f"\nafter {state.tokens:,} tokens, seed {seed}: {text!r}")

    # A generated text has a state of its own, from which it can be continued.
    first = lm.generate("class ", tokens=20, seed=1)
    print(f"\n{first!r} and on: {lm.generate(tokens=20, seed=1, state=first.state)!r}")

    # How far back the heads have learned to look, and where in this span they do look.
    for layer, (spans, seen) in enumerate(zip(lm.spans() or [], lm.attention(source[:500]), strict=True)):
        print(f"layer {layer}: spans of {', '.join(f'{span:.0f}' for span in spans)} tokens")
        print("         mean distances " + ", ".join(f"{mean:.1f}" for mean in seen.mean_distance_H))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
