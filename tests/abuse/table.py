"""All mistakes, and those that wait for other work."""

from __future__ import annotations

from tests.abuse import data_mistakes, general_mistakes, import_mistakes, recipe_mistakes, run_mistakes

MISTAKES = [
    *general_mistakes.MISTAKES,
    *recipe_mistakes.MISTAKES,
    *run_mistakes.MISTAKES,
    *data_mistakes.MISTAKES,
    *import_mistakes.MISTAKES,
]

# Usage errors get a status of their own elsewhere: empty this when they have it.
STATUS_TODAY = {2: 1}
# Names of mistakes that other work mends, and what it mends: empty this when it is there.
REPEATED = "a repeated option is an error"
PARENT = "a new file or folder needs an existing parent"
WAITING = {
    "eval run --device cpu --device cpu": REPEATED,
    "generate run --device cpu --device cpu": REPEATED,
    "attention run text.txt --device cpu --device cpu": REPEATED,
    "bench tiny.toml --device cpu --device cpu": REPEATED,
    "train tiny.toml --out new --out new": REPEATED,
    "train tiny.toml --out new --model.width 8 --model.width 8": REPEATED,
    "train tiny.toml --out new --data text.txt --data.corpus text.txt": REPEATED,
    "train tiny.toml --out missing/new": PARENT,
    "spans run --out missing/new.png": PARENT,
    "attention run text.txt --json missing/new.json": PARENT,
    "generate word --prompt 'wordless zzz'": "a prompt with unknown words is refused",
}
