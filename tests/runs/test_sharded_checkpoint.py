"""Checkpoints of several processes, here with one: what they hold, how they are replaced, damage, faults."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros

import longspan
from longspan.errors import UserError
from longspan.runs import RunFolder, checkpoint, sharded_checkpoint
from longspan.runs.init import Init
from longspan.runs.sharded_checkpoint import ShardedWriter
from longspan.training import Interrupted, resume, resume_point, train
from tests.training.runs import Lines, Signals, outcome, small_config

FACTS = {"progress": {"step": 3}, "number": 0.1, "nothing": None}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def writer(group: None) -> ShardedWriter:
    return ShardedWriter(60.0)


@pytest.fixture
def last(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "last.safetensors"


def tensors(step: int = 0) -> dict[str, Tensor]:
    tied = torch.arange(6.0).view(2, 3) + step
    return {
        "model.weight": tied,
        "number.inner": torch.ones(1),
        "model.tied": tied,
        "model.turned": tied.t(),
        "model.part": torch.arange(9.0)[2:5],
        "model.expanded": torch.ones(1).expand(3),
        "number": torch.tensor(2.5 + step),
        "flag": torch.tensor(True),
        "flags": torch.tensor([True, False]),
        "count": torch.tensor(1 << 40),
        "half": torch.randn(3, 2).bfloat16(),
        "generator.rank0.cpu": torch.get_rng_state(),
        "empty": torch.zeros(0, 3),
        "state.lane": torch.zeros(2, 0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def written(writer: ShardedWriter, path: Path, step: int, keep: int = 1) -> None:
    path.parent.mkdir(exist_ok=True)
    writer.save(path, tensors(step), {"step": step}, keep)
    writer.wait()


def steps(path: Path) -> list[int]:
    return [checkpoint.load(found).facts["step"] for found in (path, *checkpoint.previous(path))]


def shard(path: Path) -> Path:
    (found,) = path.glob("shard-*.safetensors")
    return found


class TestContents:
    def test_everything_comes_back(self, writer: ShardedWriter, last: Path) -> None:
        last.parent.mkdir()
        expected = tensors()
        writer.save(last, expected, FACTS)
        writer.wait()
        loaded = checkpoint.load(last)
        assert_same(loaded.tensors, expected)
        assert loaded.facts == FACTS
        assert {entry.name for entry in last.parent.iterdir()} == {"last.safetensors"}
        assert {entry.name for entry in last.iterdir()} == {"facts.json", shard(last).name}

    def test_without_values(self, writer: ShardedWriter, last: Path) -> None:
        written(writer, last, 5)
        checked = checkpoint.check(last)
        assert checked.facts == {"step": 5}
        assert {name: t.shape for name, t in checked.tensors.items()} == {
            name: t.shape for name, t in tensors().items()
        }
        assert all(tensor.is_meta for tensor in checked.tensors.values())

    def test_no_tensors(self, writer: ShardedWriter, last: Path) -> None:
        last.parent.mkdir()
        writer.save(last, {}, FACTS)
        writer.wait()
        assert checkpoint.load(last) == checkpoint.Checkpoint({}, FACTS)

    def test_what_changes_after_save_is_not_written(
        self, writer: ShardedWriter, last: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go, write = threading.Event(), sharded_checkpoint._Writer.write_data

        def later(*arguments: Any) -> Any:
            assert go.wait(60)
            return write(*arguments)

        monkeypatch.setattr(sharded_checkpoint._Writer, "write_data", later)
        last.parent.mkdir()
        mesh = init_device_mesh("cpu", (1,))
        changed = {"plain": torch.arange(5.0), "sharded": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
        facts = {"step": 1, "inner": {"a": 1}}
        writer.save(last, changed, facts)
        with torch.no_grad():
            changed["plain"].zero_()
            changed["sharded"].mul_(7)
        facts["inner"]["a"] = 2  # type: ignore[index]
        assert not last.exists()
        go.set()
        writer.wait()
        loaded = checkpoint.load(last)
        assert_same(loaded.tensors, {"plain": torch.arange(5.0), "sharded": torch.ones(4)})
        assert loaded.facts["inner"] == {"a": 1}

    @pytest.mark.parametrize("form", ["file", "folder"])
    def test_into_given_tensors(self, writer: ShardedWriter, last: Path, form: str) -> None:
        last.parent.mkdir()
        whole = {"a": torch.arange(10.0).view(5, 2), "b": torch.tensor(3), "c": torch.ones(2)}
        if form == "file":
            checkpoint.save(last, whole, FACTS)
        else:
            writer.save(last, whole, FACTS)
            writer.wait()
        mesh, kinds = init_device_mesh("cpu", (1,)), {}

        def place(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
            kinds[name] = tuple(shape), dtype
            if name == "a":
                return zeros(shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
            return None if name == "c" else torch.zeros(shape, dtype=dtype)

        loaded = sharded_checkpoint.load(last, place)
        assert kinds == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()}
        assert loaded.tensors.keys() == {"a", "b"}
        assert isinstance(loaded.tensors["a"], DTensor)
        assert torch.equal(loaded.tensors["a"].full_tensor(), whole["a"])
        assert torch.equal(loaded.tensors["b"], whole["b"])
        assert loaded.facts == FACTS

    def test_replicated(self, writer: ShardedWriter, last: Path) -> None:
        last.parent.mkdir()
        mesh = init_device_mesh("cpu", (1,))
        writer.save(last, {"a": distribute_tensor(torch.arange(3), mesh, [Replicate()])}, {})
        writer.wait()
        assert torch.equal(checkpoint.load(last).tensors["a"], torch.arange(3))

    def test_facts_that_are_not_json(self, writer: ShardedWriter, last: Path) -> None:
        written(writer, last, 1)
        with pytest.raises(TypeError):
            writer.save(last, tensors(), {"not JSON": object()})
        writer.wait()
        assert steps(last) == [1]


class TestReplacing:
    @pytest.mark.parametrize("keep", [1, 2, 3])
    def test_the_last_ones_are_kept(self, writer: ShardedWriter, last: Path, keep: int) -> None:
        for step in range(5):
            written(writer, last, step, keep)
            assert steps(last) == [*range(step, max(step - keep, -1), -1)]
        assert len([*last.parent.iterdir()]) == keep

    @pytest.mark.parametrize("keep", [1, 2, 3])
    def test_files_and_folders_replace_each_other(self, writer: ShardedWriter, last: Path, keep: int) -> None:
        last.parent.mkdir()
        for step, form in enumerate("ffFFfFFff"):
            if form == "f":
                checkpoint.save(last, tensors(step), {"step": step}, keep)
            else:
                written(writer, last, step, keep)
            assert last.is_dir() == (form == "F")
            assert steps(last) == [*range(step, max(step - keep, -1), -1)]
        assert len([*last.parent.iterdir()]) == keep

    @pytest.mark.parametrize("keep", [1, 2])
    def test_there_is_a_whole_one_at_every_moment(
        self, writer: ShardedWriter, last: Path, keep: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stop before each change of a name: the old or the new checkpoint is found, and all goes on."""
        seen: list[int] = []
        replace, remove = os.replace, shutil.rmtree
        for moment in itertools.count():
            remove(last.parent, ignore_errors=True)
            for step in range(3):
                written(writer, last, step, keep)
            left = iter(range(moment))  # changes until it is as if killed: then nothing changes any more

            def stopping_replace(*names: Path, left: Iterator[int] = left) -> None:
                if next(left, None) is None:
                    raise OSError("stopped")
                replace(*names)

            def stopping_remove(
                folder: Path, ignore_errors: bool = False, left: Iterator[int] = left
            ) -> None:
                if next(left, None) is not None:
                    remove(folder, ignore_errors)

            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", stopping_replace)
                patch.setattr(shutil, "rmtree", stopping_remove)
                writer.save(last, tensors(3), {"step": 3}, keep)
                with suppress(UserError):
                    writer.wait()
            found = checkpoint.load(last)
            seen.append(found.facts["step"])
            assert torch.equal(found.tensors["number"], torch.tensor(2.5 + seen[-1]))
            written(writer, last, 4, keep)
            names = {entry.name for entry in last.parent.iterdir()}
            assert names <= {"last.safetensors", *(f"last-{number}.safetensors" for number in range(1, keep))}
            assert steps(last) == [4, seen[-1]][:keep]
            if next(left, None) is not None:
                break
        assert seen == sorted(seen)
        assert {*seen} == {2, 3}
        assert len(seen) > 4

    def test_what_a_killed_process_left_is_removed(self, writer: ShardedWriter, last: Path) -> None:
        last.parent.mkdir()
        for name in (".last.safetensors.123.abcd@elsewhere.part", ".last-1.safetensors.9.ef@other.part"):
            (last.parent / name).mkdir()
            (last.parent / name / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"part")
        (last.parent / ".last.safetensors.124.abcd@elsewhere.part").write_bytes(b"part")
        (last.parent / ".best.safetensors.124.abcd@elsewhere.part").mkdir()
        written(writer, last, 1)
        assert {entry.name for entry in last.parent.iterdir()} == {
            "last.safetensors",
            ".best.safetensors.124.abcd@elsewhere.part",
        }

    def test_a_link_is_replaced_and_not_followed(
        self, writer: ShardedWriter, last: Path, tmp_path: Path
    ) -> None:
        outside = tmp_path / "outside.safetensors"
        outside.mkdir()
        (outside / "precious").write_text("kept")
        last.parent.mkdir()
        last.symlink_to(outside)
        for step in range(3):
            written(writer, last, step)
        assert not last.is_symlink()
        assert steps(last) == [2]
        assert [entry.name for entry in outside.iterdir()] == ["precious"]

    def test_reading_while_it_is_replaced(
        self, writer: ShardedWriter, last: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from longspan.runs import shards

        written(writer, last, 1)
        verify, replaced = shards.verify, []

        def late(files: Any) -> None:
            if not replaced:
                replaced.append(True)
                written(writer, last, 2)
            verify(files)

        monkeypatch.setattr("longspan.runs.shard_reader.verify", late)
        loaded = checkpoint.load(last)
        assert loaded.facts == {"step": 2}
        assert torch.equal(loaded.tensors["number"], torch.tensor(4.5))


DAMAGE = {
    "truncated": "does not have its size",
    "flipped": "has changed",
    "missing": "is missing",
    "facts changed": "facts.json in it has changed",
    "facts cut": "facts.json in it is not readable",
    "facts nested": "facts.json in it is not readable",
    "no facts": "it has no facts.json",
    "extra": "other.safetensors does not belong in it",
    "link": "is not a regular file",
    "pipe": "is not a regular file",
    "link to all": "a link, and links are not followed",
}


def damage(path: Path, how: str) -> None:
    file, facts = shard(path), path / "facts.json"
    content, said = bytearray(file.read_bytes()), facts.read_text()
    content[-1] ^= 1
    if how == "truncated":
        file.write_bytes(content[:-5])
    elif how == "flipped":
        file.write_bytes(content)
    elif how == "missing":
        file.unlink()
    elif how == "facts changed":
        facts.write_text(said.replace('"step": 1', '"step": 2'))
    elif how == "facts cut":
        facts.write_text(said[:-9])
    elif how == "facts nested":
        facts.write_text("[" * 100_000)
    elif how == "no facts":
        facts.unlink()
    elif how == "extra":
        shutil.copy(file, path / "other.safetensors")
    elif how in ("link", "pipe"):
        moved = Path(shutil.move(file, path.parent.parent / "moved"))
        file.symlink_to(moved) if how == "link" else os.mkfifo(file)
    else:
        path.symlink_to(Path(shutil.move(path, path.parent.parent / "moved")))


class TestDamage:
    @pytest.mark.parametrize(("how", "said"), DAMAGE.items())
    def test_it_is_found(self, writer: ShardedWriter, last: Path, how: str, said: str) -> None:
        written(writer, last, 0, keep=2)
        written(writer, last, 1, keep=2)
        damage(last, how)
        for read in (checkpoint.load, checkpoint.check):
            with pytest.raises(checkpoint.Damaged, match=said) as problem:
                read(last)
            assert "\n" not in str(problem.value)
            assert str(problem.value).startswith(f"the checkpoint {last} is ")
            hint = "; replace it by last-1.safetensors to continue from there"
            assert str(problem.value).endswith(hint)

    def test_a_tensor_without_all_its_parts(self, writer: ShardedWriter, last: Path) -> None:
        """The checksums are right: somebody wrote it."""
        from safetensors.torch import save_file

        from longspan.runs.shards import Shard as Entry
        from longspan.runs.shards import contents

        written(writer, last, 1)
        info = json.dumps({"a": {"saved_offsets": [1 << 50]}})
        save_file({"a": torch.ones(2)}, shard(last), metadata={"DCP_SHARDING_INFO": info})
        (last / "facts.json").write_text(contents({}, {shard(last).name: Entry.of(shard(last))}))
        with pytest.raises(checkpoint.Damaged, match="a is incomplete"):
            checkpoint.load(last)

    def test_a_name_that_leaves_the_folder(self, writer: ShardedWriter, last: Path) -> None:
        from longspan.runs.shards import Shard as Entry
        from longspan.runs.shards import contents

        written(writer, last, 1)
        outside = Path(shutil.move(shard(last), last.parent / "x.safetensors"))
        (last / "facts.json").write_text(contents({}, {"../x.safetensors": Entry.of(outside)}))
        with pytest.raises(checkpoint.Damaged, match="is missing"):
            checkpoint.load(last)


class TestFaults:
    def test_a_full_disk(self, writer: ShardedWriter, last: Path) -> None:
        resource = pytest.importorskip("resource")
        written(writer, last, 1)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # what no file may outgrow
        try:
            writer.save(last, {"model.weight": torch.ones(5000)}, {"step": 2})
            with pytest.raises(
                UserError, match=r"could not write the checkpoint .*last\.safetensors: File too"
            ):
                writer.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert steps(last) == [1]
        assert len([*last.parent.iterdir()]) == 1
        written(writer, last, 3)
        assert steps(last) == [3]

    def test_a_read_only_folder(
        self, writer: ShardedWriter, last: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written(writer, last, 1)

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(30, "Read-only file system")

        with monkeypatch.context() as patch:
            patch.setattr("longspan.runs.sharded_checkpoint.make_room", refuse)
            writer.save(last, tensors(), {"step": 2})
            with pytest.raises(UserError, match="Read-only file system"):
                writer.save(last, tensors(), {"step": 3})  # the save before is reported first
        assert steps(last) == [1]
        assert len([*last.parent.iterdir()]) == 1

    def test_no_folder(self, writer: ShardedWriter, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("a file")
        writer.save(tmp_path / "file" / "last.safetensors", tensors(), {})
        with pytest.raises(UserError, match=r"could not write the checkpoint .*: File exists"):
            writer.wait()


class TestRuns:
    @pytest.fixture
    def run(self, uninterrupted: Path, tmp_path: Path, writer: ShardedWriter) -> RunFolder:
        """A finished run whose checkpoints are folders."""
        run = RunFolder(Path(shutil.copytree(uninterrupted, tmp_path / "run")))
        for path in (run.checkpoint("best"), run.checkpoint("last")):
            saved = checkpoint.load(path)
            writer.save(path, saved.tensors, saved.facts)
            writer.wait()
        return run

    def test_they_are_loaded_as_any_other(self, run: RunFolder, uninterrupted: Path) -> None:
        assert run.checkpoint("best").is_dir()
        for which in ("best", "last"):
            found, expected = (
                longspan.load(path, which=which, device="cpu").model.state_dict()  # type: ignore[arg-type]
                for path in (run.path, uninterrupted)
            )
            assert_same(found, expected)

    def test_another_run_starts_from_them(self, run: RunFolder, uninterrupted: Path) -> None:
        best = run.checkpoint("best")
        for given in (run.path, best):
            assert Init(given).file == best
            found = Init(given).run
            assert found is not None
            assert found.path == run.path
            assert len(Init(given).facts()["sha256"]) == 64
            model = longspan.load(uninterrupted, which="last", device="cpu").model
            Init(given).load(model)
            assert_same(model.state_dict(), longspan.load(uninterrupted, device="cpu").model.state_dict())

    def test_a_stopped_run_continues(
        self, text: Path, uninterrupted: Path, tmp_path: Path, writer: ShardedWriter
    ) -> None:
        with pytest.raises(Interrupted):
            train(small_config(text), tmp_path / "run", reporter=Signals("step 38 ", signal.SIGINT))
        run = RunFolder(tmp_path / "run")
        for path in (run.checkpoint("last"), run.checkpoint("best")):
            saved = checkpoint.load(path)
            writer.save(path, saved.tensors, saved.facts, keep=2)
            writer.wait()
        resume(run.path)
        assert run.checkpoint("last").is_file()  # this process wrote alone
        assert outcome(run.path) == outcome(uninterrupted)

    def test_a_best_one_that_was_being_replaced(self, run: RunFolder, uninterrupted: Path) -> None:
        best = run.checkpoint("best")
        os.replace(best, best.with_name("best-1.safetensors"))
        found = longspan.load(run.path, device="cpu").model.state_dict()
        assert_same(found, longspan.load(uninterrupted, device="cpu").model.state_dict())

    def test_a_damaged_last_one(self, run: RunFolder, writer: ShardedWriter) -> None:
        last = run.checkpoint("last")
        saved = checkpoint.load(last)
        writer.save(last, saved.tensors, saved.facts, keep=2)
        writer.wait()
        damage(last, "flipped")
        said = Lines()
        again = resume_point.load(run, said)
        assert again is not None
        assert_same(again.tensors, saved.tensors)
        assert said.lines == [f"{last} is damaged (now last.damaged): continuing from last-1.safetensors"]
        damage(last, "missing")
        said = Lines()
        assert resume_point.load(run, said) is not None
        assert said.lines == [f"{last} is damaged (now last.damaged): continuing from best.safetensors"]
        assert last.is_dir()
        assert run.checkpoint("best").is_dir()
        damage(last, "missing")
        damage(run.checkpoint("best"), "missing")
        with pytest.raises(checkpoint.Damaged, match=r"and so is best\.safetensors: start a new run"):
            resume_point.load(run, said)
