"""Twenty kills of runs of two processes, of either rank: replicated weights, and sharded ones.

torchrun starts the processes again after each kill. The end is that of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.distributed.elastic import Kill, assert_ends_as_undisturbed, write_recipe

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

OF_RANK_0 = (
    "in_the_middle_of_a_line",
    "in_the_middle_of_the_facts",
    "before_older_checkpoints_are_renamed",
    "before_a_checkpoint_gets_its_name",
    "before_older_checkpoints_are_removed",
    "before_a_rename",
    "after_a_rename",
)
OF_ANY_RANK = (
    "after_an_update",
    "soon_after_an_update",
    "in_an_evaluation",
    "before_a_shard",
    "in_the_middle_of_a_shard",
)
UPDATES = ("after_an_update", "soon_after_an_update")


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_ten_kills_each(shard: bool, tmp_path: Path) -> None:
    """And two more: as soon as the folder is there, and when all is done."""
    draw = random.Random(22 + shard)
    drawn = [(0, moment) for moment in draw.sample(OF_RANK_0, 4)]
    drawn += [(draw.randrange(2), moment) for moment in OF_ANY_RANK]
    draw.shuffle(drawn)
    kills: list[Kill] = [(0, "after_the_folder_was_created", 1), (1, "at_the_start", 1)]
    for rank, moment in drawn:
        # Each start gets past at least one checkpoint, so all of the kills are reached.
        kills.append((rank, moment, draw.randint(5, 9) if moment in UPDATES else draw.randint(2, 3)))
    kills.append((0, "after_the_final_line", 1))
    recipe = write_recipe(
        tmp_path, steps=(90, 90), shard=shard, checkpoint_every=4, evaluate_every=6, keep_checkpoints=3
    )
    assert_ends_as_undisturbed(tmp_path, recipe, kills, timeout=900)
