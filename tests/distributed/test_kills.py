"""Three kills of a run of two processes: before its first step, in a checkpoint, and at any moment.

`make test-faults` has more of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .elastic import assert_ends_as_undisturbed, write_recipe


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_three_kills(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, checkpoint_every=6)
    assert_ends_as_undisturbed(
        tmp_path,
        recipe,
        [
            (0, "after_the_folder_was_created", 1),
            (1, "soon_after_an_update", 14),
            (0, "before_a_checkpoint_gets_its_name", 2),
        ],
    )
