"""What the processes of the tests of sharded checkpoints do: each function is one rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros

from longspan import distributed
from longspan.errors import UserError
from longspan.runs import RunFolder, checkpoint, sharded_checkpoint
from longspan.runs.sharded_checkpoint import ShardedWriter
from longspan.training import resume_point
from longspan.training.run_progress import RunProgress
from tests.training.runs import Lines

SHARDED = {
    "model.uneven": (5, 3),
    "model.one": (1,),
    "model.none": (0, 2),
    "model.lanes": (4, 0, 3),
    "model.even": (8, 2),
}


def whole_tensors() -> dict[str, Tensor]:
    """What is sharded, as whole tensors."""
    draw = torch.Generator().manual_seed(7)
    held = {name: torch.randn(shape, generator=draw) for name, shape in SHARDED.items()}
    return held | {"model.half": torch.randn(7, generator=draw).bfloat16()}


def plain_tensors() -> dict[str, Tensor]:
    """What every rank has."""
    weight = torch.arange(4.0).view(2, 2)
    held = {"plain": weight, "tied": weight, "flag": torch.tensor(False), "step": torch.tensor(3)}
    return held | {f"number.{number}": torch.full((100,), float(number)) for number in range(6)}


def own_tensors(rank: int) -> dict[str, Tensor]:
    """What only one rank has."""
    return {f"generator.rank{rank}.cpu": torch.full((5,), rank, dtype=torch.uint8)}


def all_tensors(ranks: int) -> dict[str, Tensor]:
    held = whole_tensors() | plain_tensors()
    for rank in range(ranks):
        held |= own_tensors(rank)
    return held


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        held = found[name]
        full = held.full_tensor() if isinstance(held, DTensor) else held
        assert (full.dtype, full.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(full, tensor), name


@contextmanager
def joined(rank: int, ranks: int, store: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    yield init_device_mesh("cpu", (ranks,))
    dist.barrier()
    dist.destroy_process_group()


def placed(mesh: DeviceMesh) -> Callable[[str, torch.Size, torch.dtype], Tensor | None]:
    def place(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        if name.startswith("model."):
            return zeros(shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
        return torch.zeros(shape, dtype=dtype)

    return place


def save_and_fail(rank: int, ranks: int, folder: Path) -> None:
    with joined(rank, ranks, folder / f"store-{ranks}") as mesh:
        writer, path = ShardedWriter(), folder / "checkpoints" / "last.safetensors"
        sharded: dict[str, Tensor] = {
            name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole_tensors().items()
        }
        sharded["model.even"] = distribute_tensor(whole_tensors()["model.even"], mesh, [Replicate()])
        tensors = sharded | plain_tensors() | own_tensors(rank)
        facts = {"ranks": ranks, "progress": RunProgress().to_json()}
        writer.save(path, tensors, facts, keep=2)
        with torch.no_grad():
            for tensor in tensors.values():  # the copy must be complete
                tensor.zero_()
        writer.wait()
        check(path, mesh, ranks, ranks)
        for failing in range(ranks):
            one_rank_fails(writer, path, failing)
            check(path, mesh, ranks, ranks)
        writer.save(path, {"model.other": tensors["model.uneven"]}, {**facts, "second": True}, keep=2)
        writer.wait()
        assert checkpoint.load(path).facts["second"]
        resume_from_the_one_before(folder, mesh, ranks)


def check(path: Path, mesh: DeviceMesh, saved: int, ranks: int) -> None:
    """Read by all ranks: parts, and without communication everything."""
    loaded = checkpoint.load(path, placed(mesh))
    assert_same(loaded.tensors, all_tensors(saved))
    assert isinstance(loaded.tensors["model.uneven"], DTensor)
    assert len(loaded.tensors["model.uneven"].to_local()) < 5 or ranks == 1
    assert loaded.facts["ranks"] == saved
    if rank_is_last(ranks):
        assert_same(checkpoint.load(path).tensors, all_tensors(saved))
    dist.barrier()


def rank_is_last(ranks: int) -> bool:
    return distributed.rank() == ranks - 1


def one_rank_fails(writer: ShardedWriter, path: Path, failing: int) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if distributed.rank() == failing:
            patch.setattr(sharded_checkpoint._Writer, "write_data", refuse)
        writer.save(path, {"other": torch.ones(3)}, {})
        with pytest.raises(UserError) as problem:
            writer.wait()
    assert str(problem.value) == (
        f"could not write the checkpoint {path}: No space left on device (rank {failing})"
    )
    dist.barrier()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    dist.barrier()


def resume_from_the_one_before(folder: Path, mesh: DeviceMesh, ranks: int) -> None:
    run, said = RunFolder(folder), Lines()
    last = run.checkpoint("last")
    dist.barrier()
    if distributed.is_first():
        shard = max(last.glob("shard-*"), key=lambda file: file.name)
        shard.write_bytes(shard.read_bytes()[:-1])
    dist.barrier()
    again = resume_point.load(run, said, placed(mesh))
    assert again is not None
    assert_same(again.tensors, all_tensors(ranks))
    expected = f"{last} is damaged (now last.damaged): continuing from last-1.safetensors"
    assert said.lines == ([expected] if distributed.is_first() else [])
    assert resume_point.load(RunFolder(folder / "nothing"), said) is None


def read(rank: int, ranks: int, folder: Path, saved: int) -> None:
    with joined(rank, ranks, folder / f"store-{ranks}-read") as mesh:
        check(folder / "checkpoints" / "last.safetensors", mesh, saved, ranks)
        loaded = resume_point.load(RunFolder(folder), Lines(), placed(mesh))
        assert loaded is not None
        assert_same(loaded.tensors, all_tensors(saved))


def save_forever(rank: int, ranks: int, store: Path, folder: Path) -> None:
    """Save `last` and `best` in turn; say the step when both are in place."""
    run = RunFolder(folder)
    with joined(rank, ranks, store) as mesh:
        writer, step = ShardedWriter(), 0
        if checkpoint.exists(run.checkpoint("last")):
            step = checkpoint.load(run.checkpoint("last")).facts["step"]
        while True:
            step += 1
            weight = distribute_tensor(torch.full((64, 4096), float(step)), mesh, [Shard(0)])
            tensors = {"weight": weight, "plain": torch.full((8,), step)}
            writer.save(run.checkpoint("last"), tensors, {"step": step}, keep=2)
            writer.save(run.checkpoint("best"), tensors, {"step": step})
            writer.wait()
            if rank == 0:
                print(step, flush=True)


if __name__ == "__main__":
    save_forever(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
