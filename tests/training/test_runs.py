"""Checkpoints and run folders: what is written comes back, and what is damaged is noticed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longspan.config import RunConfig, StageConfig
from longspan.errors import UserError
from longspan.runs import RunFolder, checkpoint, pick_device
from longspan.runs.environment import environment, git_commit


class NoTokenizer:
    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")


def tensors() -> dict[str, torch.Tensor]:
    shared = torch.arange(6.0).view(2, 3)
    return {
        "model.weight": shared,
        "model.tied": shared,
        "model.turned": shared.T,
        "state.memory": torch.empty(2, 0, 3),
        "rng.cpu": torch.arange(5, dtype=torch.uint8),
        "optimizer.step": torch.tensor(3.0),
        "state.half": torch.ones(2, dtype=torch.bfloat16),
    }


FACTS = {"step": 7, "best": None, "position": {"next": 3}}


class TestCheckpoint:
    def test_it_comes_back_as_it_was(self, tmp_path: Path) -> None:
        path = tmp_path / "last.safetensors"
        checkpoint.save(path, tensors(), FACTS)
        back = checkpoint.load(path)
        assert back.facts == FACTS
        assert back.tensors.keys() == tensors().keys()
        for name, tensor in tensors().items():
            assert back.tensors[name].dtype == tensor.dtype
            assert torch.equal(back.tensors[name], tensor)
        assert back.below("state").keys() == {"memory", "half"}
        assert [entry.name for entry in tmp_path.iterdir()] == ["last.safetensors"]

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_any_flipped_bit_is_noticed(self, tmp_path: Path, data: st.DataObject) -> None:
        path = tmp_path / "last.safetensors"
        if not path.exists():
            checkpoint.save(path, tensors(), FACTS)
        whole = path.read_bytes()
        where = data.draw(st.integers(0, len(whole) - 1))
        broken = bytearray(whole)
        broken[where] ^= 1 << data.draw(st.integers(0, 7))
        other = tmp_path / "damaged"
        other.write_bytes(broken)
        with pytest.raises(UserError, match="damaged"):
            checkpoint.load(other)

    @pytest.mark.parametrize("kept", [0, 5, 100, -1])
    def test_a_truncated_file_is_named(self, tmp_path: Path, kept: int) -> None:
        path = tmp_path / "last.safetensors"
        checkpoint.save(path, tensors(), FACTS)
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(UserError, match=r"last\.safetensors is truncated or damaged$"):
            checkpoint.load(path)

    def test_the_other_checkpoint_is_offered(self, tmp_path: Path) -> None:
        checkpoint.save(tmp_path / "best.safetensors", tensors(), FACTS)
        (tmp_path / "last.safetensors").write_bytes(b"no")
        with pytest.raises(UserError, match=r"copy best\.safetensors over it"):
            checkpoint.load(tmp_path / "last.safetensors")

    def test_but_not_if_it_is_damaged_too(self, tmp_path: Path) -> None:
        for name in ("best", "last"):
            (tmp_path / f"{name}.safetensors").write_bytes(b"no")
        with pytest.raises(
            UserError, match=r"last\.safetensors is .*, and so is best\.safetensors: start a new run$"
        ):
            checkpoint.load(tmp_path / "last.safetensors")

    def test_a_file_that_the_system_does_not_open_is_not_called_damaged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "last.safetensors"
        checkpoint.save(path, tensors(), FACTS)

        def refuse(self: Path, *_: object) -> None:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(PermissionError, match="last"):
            checkpoint.load(path)

    def test_nor_is_one_for_which_there_is_no_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "last.safetensors"
        checkpoint.save(path, tensors(), FACTS)

        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr(checkpoint, "safe_open", refuse)
        with pytest.raises(RuntimeError, match="can't allocate"):
            checkpoint.load(path)

    def test_a_foreign_file_and_a_missing_one(self, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        save_file({"a": torch.ones(1)}, tmp_path / "foreign.safetensors")
        with pytest.raises(UserError, match="not a checkpoint of longspan"):
            checkpoint.load(tmp_path / "foreign.safetensors")
        with pytest.raises(UserError, match="there is no checkpoint"):
            checkpoint.load(tmp_path / "nowhere.safetensors")

    def test_a_failed_write_leaves_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "last.safetensors"
        checkpoint.save(path, tensors(), FACTS)
        before = path.read_bytes()
        with pytest.raises(TypeError):
            checkpoint.save(path, tensors(), {"not JSON": object()})
        assert path.read_bytes() == before
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_full_disk_is_one_line_and_leaves_the_old_file(self, tmp_path: Path) -> None:
        resource = pytest.importorskip("resource")
        path = tmp_path / "last.safetensors"
        checkpoint.save(path, tensors(), FACTS)
        before = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # what no file may outgrow
        try:
            with pytest.raises(UserError, match=r"could not write the checkpoint .*last\.safetensors: .+"):
                checkpoint.save(path, {"model.weight": torch.ones(5000)}, FACTS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        assert len(list(tmp_path.iterdir())) == 1


class TestRunFolder:
    def test_it_holds_configuration_environment_and_tokenizer(self, tmp_path: Path) -> None:
        config = RunConfig(name="a run")
        run = RunFolder.create(tmp_path / "runs" / "one", config, NoTokenizer(), "1234")  # type: ignore[arg-type]
        assert RunFolder.open(run.path).config == config
        surroundings = json.loads((run.path / "environment.json").read_text())
        assert surroundings["torch"] == torch.__version__
        assert surroundings["threads"] == torch.get_num_threads()
        assert (run.path / "tokenizer" / "tokenizer.json").is_file()

    def test_an_existing_folder_is_not_touched(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("precious")
        with pytest.raises(UserError, match=r"exists already: choose another folder$"):
            RunFolder.create(tmp_path, RunConfig(), NoTokenizer(), "1234")  # type: ignore[arg-type]
        assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]

    def test_one_may_go_on_with_a_run_that_exists(self, tmp_path: Path) -> None:
        config = RunConfig(stage=(StageConfig(steps=1, learning_rate=0.1),))
        path = RunFolder.create(tmp_path / "run", config, NoTokenizer(), "1234").path  # type: ignore[arg-type]
        with pytest.raises(UserError, match=f"folder, or continue with 'longspan train --resume {path}'$"):
            RunFolder.must_be_new(path)

    def test_but_not_with_one_that_is_not_for_training(self, tmp_path: Path) -> None:
        path = RunFolder.create(tmp_path / "run", RunConfig(), NoTokenizer(), "1234").path  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"run exists already: choose another folder$"):
            RunFolder.must_be_new(path)

    def test_a_folder_that_appears_meanwhile_is_not_touched(self, tmp_path: Path) -> None:
        class Slow(NoTokenizer):
            def save(self, folder: Path) -> None:
                super().save(folder)
                (tmp_path / "run").mkdir()
                (tmp_path / "run" / "mine.txt").write_text("precious")

        with pytest.raises(UserError, match="run exists already: choose another folder"):
            RunFolder.create(tmp_path / "run", RunConfig(), Slow(), "1234")  # type: ignore[arg-type]
        assert [entry.name for entry in tmp_path.rglob("*")] == ["run", "mine.txt"]

    @pytest.mark.parametrize("content", [None, b"{", b"\xff", b"{}", b"[1]"])
    def test_facts_that_are_damaged(self, tmp_path: Path, content: bytes | None) -> None:
        run = RunFolder.create(tmp_path / "run", RunConfig(), NoTokenizer(), "1234")  # type: ignore[arg-type]
        assert run.fingerprint == "1234"
        (run.path / "corpus.json").unlink()
        if content is not None:
            (run.path / "corpus.json").write_bytes(content)
        with pytest.raises(UserError, match=r"corpus\.json is missing or damaged"):
            run.fingerprint  # noqa: B018

    @pytest.mark.parametrize("last", [b"\xff\xfe", b"5", b"[]"])
    def test_a_last_line_that_is_damaged_is_no_final_score(self, tmp_path: Path, last: bytes) -> None:
        run = RunFolder.create(tmp_path / "run", RunConfig(), NoTokenizer(), "1234")  # type: ignore[arg-type]
        run.metrics.write_bytes(b'{"kind": "final"}\n' + last)
        assert run.final() is None

    def test_what_is_no_run_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="not a run folder"):
            RunFolder.open(tmp_path)
        with pytest.raises(UserError, match="no run folder"):
            RunFolder.open(tmp_path / "nowhere")


def test_the_commit_is_that_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the project somebody stands in, nor of one that has the package installed inside."""
    project = tmp_path / "project"
    installed = project / ".venv" / "lib"
    installed.mkdir(parents=True)
    git = ["git", "-C", str(project), "-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    answer = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    commit = answer.stdout.strip()
    monkeypatch.chdir(project)
    assert environment(torch.device("cpu"))["git_commit"] != commit
    assert git_commit(project) == commit
    assert git_commit(installed) is None
    assert git_commit(tmp_path) is None


def test_kernels_are_launched_on_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: torch.ones(1))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: torch.ones(1))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def _as_process(monkeypatch: pytest.MonkeyPatch, number: int, processes: int) -> None:
    """The variables of process `number` on a machine where torchrun started `processes`."""
    places = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")


@pytest.mark.usefixtures("_two_gpus")
def test_every_process_of_torchrun_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("auto") == torch.device("cuda")
    _as_process(monkeypatch, 1, 2)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda:1")
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="2 processes cannot share cuda:0: use cuda"):
        pick_device("cuda:0")
    _as_process(monkeypatch, 0, 1)
    assert pick_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.usefixtures("_two_gpus")
def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_process(monkeypatch, 3, 4)
    line = "4 processes on this machine but 2 GPUs: start torchrun with --nproc-per-node 2"
    for name in ("auto", "cuda"):
        with pytest.raises(UserError, match=line):
            pick_device(name)


def test_processes_of_torchrun_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _as_process(monkeypatch, 1, 2)
    assert pick_device("auto") == torch.device("cpu")


def test_devices_by_name() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    for name in ("tpu9", "cuda:99", "", "meta", "hpu"):
        with pytest.raises(UserError, match="no device"):
            pick_device(name)
