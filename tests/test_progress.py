"""Progress in a log: a line every tenth of the way."""

from __future__ import annotations

import pytest

from longspan.progress import every_tenth


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([(done, 100) for done in range(101)], [*range(10, 101, 10)]),
        ([(5, 100), (9, 100), (37, 100), (39, 100), (100, 100), (100, 100)], [37, 100]),
        ([(1, 3), (2, 3), (3, 3)], [1, 2, 3]),
        ([(5, 0), (6, 0)], []),
        ([], []),
    ],
)
def test_every_tenth_is_said_once(told: list[tuple[int, int]], said: list[int]) -> None:
    lines: list[int] = []
    tell = every_tenth(lambda done, total: lines.append(done))
    for done, total in told:
        tell(done, total)
    assert lines == said
