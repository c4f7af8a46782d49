"""The mean attention weight over distance: from Python, as a figure, and by `longspan attention`."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan.cli import main
from longspan.config import RunConfig
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.errors import UserError
from longspan.inspection import MeanAttention, draw_attention, mean_attention, token_attention
from longspan.inspection.attention import attention
from longspan.inspection.attention_figure import MAX_POINTS, attention_figure, bin_edges
from longspan.models import build_run
from longspan.reading import begin
from longspan.runs import RunFolder
from tests.models.test_contract import MODERN, SUPERNETS, VOCABULARY, make
from tests.using.test_attention import ATTENDING, TEXT, loaded
from tests.using.test_cli import complaint
from tests.using.tiny import run_folder

IDS = [(7 * n + n * n // 3) % VOCABULARY for n in range(40)]
CORPUS = "".join(f"line {n} of a small text, with a ß in it\n" for n in range(200))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    corpus = tmp_path / "text.txt"
    corpus.write_text(CORPUS, encoding="utf-8")
    return run_folder(tmp_path / "run", corpus=str(corpus))


def made_up(layers: int, heads: int, distances: int, persistent: bool = False) -> MeanAttention:
    weights_LHW = torch.rand(layers, heads, distances, dtype=torch.float64)
    names = tuple(f"blocks.{layer}" for layer in range(layers))
    return MeanAttention(names, weights_LHW, torch.rand(layers, heads) if persistent else None, 7)


def padded(weights_W: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(weights_W, (0, width - weights_W.shape[-1]))


@pytest.mark.parametrize("variant", [*ATTENDING, *SUPERNETS])
def test_the_mean_is_that_of_a_loop_over_all_weights(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.reading.READ_BLOCK", 9)
    model = make(variant)
    layers = attention(model, IDS)
    monkeypatch.setattr("longspan.inspection.attention.QUERIES", 4)
    mean = mean_attention(model, IDS)
    assert mean.layers == tuple(layer.name for layer in layers)
    assert mean.tokens == len(IDS)
    for number, head in mean.heads():
        seen = layers[number]
        for distance in range(mean.weights_LHW.shape[2]):
            expected = 0.0
            if distance < seen.weights_HTW.shape[2]:
                expected = sum(seen.weights_HTW[head, :, distance].tolist()) / len(IDS)
            assert mean.weights_LHW[number, head, distance].item() == pytest.approx(
                expected, rel=1e-9, abs=1e-15
            )
        assert seen.weights_HTW[head, :, mean.weights_LHW.shape[2] :].abs().sum() == 0
        if seen.persistent_HTP is not None:
            assert mean.persistent_LH is not None
            taken = seen.persistent_HTP[head].sum().item() / len(IDS)
            assert mean.persistent_LH[number, head].item() == pytest.approx(taken, rel=1e-9)


@pytest.mark.parametrize("variant", [*ATTENDING, *SUPERNETS])
def test_means_add_up(variant: str) -> None:
    mean = mean_attention(make(variant), IDS)
    total_LH = mean.weights_LHW.sum(2)
    if mean.persistent_LH is not None:
        assert ((mean.persistent_LH > 0) & (mean.persistent_LH < 1)).all()
        total_LH = total_LH + mean.persistent_LH
    if "not renormalised" in variant:
        assert (total_LH < 1).all()
    else:
        torch.testing.assert_close(total_LH, torch.ones_like(total_LH), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["adaptive-span", "all-attention", "modern, keys and values", "gpt"])
def test_blocks_and_chunks_change_nothing(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(variant)
    whole = mean_attention(model, IDS)
    done: list[tuple[int, int]] = []
    monkeypatch.setattr("longspan.reading.READ_BLOCK", 13)
    monkeypatch.setattr("longspan.inspection.attention.QUERIES", 5)
    cut = mean_attention(model, IDS, progress=lambda *numbers: done.append(numbers))
    torch.testing.assert_close(cut.weights_LHW, whole.weights_LHW, rtol=1e-9, atol=1e-12)
    assert done == [(13, 40), (26, 40), (39, 40), (40, 40)]


def test_the_two_forms_of_memory_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.reading.READ_BLOCK", 6)
    means = []
    for memory in ("hidden", "keys-values"):
        torch.manual_seed(0)
        config = RunConfig(model=dataclasses.replace(MODERN, memory=memory))
        means.append(mean_attention(build_run(config, VOCABULARY).double().eval(), IDS))
    assert means[0].weights_LHW.shape[2] > 6
    torch.testing.assert_close(means[0].weights_LHW, means[1].weights_LHW, rtol=1e-9, atol=1e-12)


def test_a_state_is_carried() -> None:
    model = make("adaptive-span")
    before = begin(model, IDS[:15])
    one, two = mean_attention(model, IDS[:15]), mean_attention(model, IDS[15:], before)
    whole = mean_attention(model, IDS)
    width = whole.weights_LHW.shape[2]
    joined = (15 * padded(one.weights_LHW, width) + 25 * padded(two.weights_LHW, width)) / 40
    torch.testing.assert_close(joined, whole.weights_LHW, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("variant", ["adaptive-span", "all-attention", "transformer-xl", "sha-rnn", "modern"])
@pytest.mark.parametrize("token", [0, 8, 9, 31])
def test_one_token(variant: str, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.reading.READ_BLOCK", 9)
    model = make(variant)
    for one, every in zip(token_attention(model, IDS, token), attention(model, IDS), strict=True):
        assert one.name == every.name
        width = every.weights_HTW.shape[2]
        torch.testing.assert_close(padded(one.weights_HTW[:, 0], width), every.weights_HTW[:, token])
        if every.persistent_HTP is not None:
            assert one.persistent_HTP is not None
            torch.testing.assert_close(one.persistent_HTP[:, 0], every.persistent_HTP[:, token])


def test_distances() -> None:
    weights_LHW = torch.zeros(2, 2, 11, dtype=torch.float64)
    weights_LHW[0, 0, 3] = 0.5
    weights_LHW[0, 1, :10] = 0.1
    weights_LHW[1, 0, 1] = 1.0
    weights_LHW[1, 1] = torch.nan  # a layer with one head
    mean = MeanAttention(("a", "b"), weights_LHW, None, 4)
    assert list(mean.heads()) == [(0, 0), (0, 1), (1, 0)]
    assert mean.mean_distance_LH[0].tolist() == pytest.approx([3.0, 4.5])
    assert mean.reach_LH()[0].tolist() == [3, 8]
    assert mean.reach_LH(0.5)[0].tolist() == [3, 4]
    assert mean.as_json()["layers"][1] == {
        "module": "b",
        "heads": [
            {"mean_distance": 1.0, "reach_50": 1, "reach_90": 1, "persistent": None, "weights": [0.0, 1.0]}
        ],
    }
    assert sum(axes.axison for axes in attention_figure(mean, "t").axes) == 3


def test_nothing_to_show() -> None:
    with pytest.raises(UserError, match="no attention"):
        loaded("sha-rnn, no attention").mean_attention(TEXT)
    with pytest.raises(UserError, match="empty"):
        loaded("adaptive-span").mean_attention("")
    with pytest.raises(UserError, match="tokens 0 to 39"):
        token_attention(make("adaptive-span"), IDS, 40)


def test_recording_ends_with_an_error() -> None:
    model = make("adaptive-span")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as _held:  # with its traceback, as a notebook does
        mean_attention(model, IDS, progress=stop)
    assert mean_attention(model, IDS).tokens == 40


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_the_figure(scale: str, tmp_path: Path) -> None:
    mean = made_up(3, 2, 1000, persistent=True)
    figure = attention_figure(mean, "mine", scale)  # type: ignore[arg-type]
    assert len(figure.axes) == 6
    assert {axes.get_xlim() for axes in figure.axes} == {(0, 999)}
    for axes in figure.axes:
        (curve,) = axes.lines
        assert 100 < len(curve.get_xdata()) <= MAX_POINTS
        assert axes.get_xscale() == ("linear" if scale == "linear" else "symlog")
    if scale == "log":
        assert len({axes.get_ylim() for axes in figure.axes}) == 1
    for name, begins in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        draw_attention(mean, "mine", tmp_path / name, scale)  # type: ignore[arg-type]
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_curves_of_few_distances_are_exact() -> None:
    mean = made_up(1, 1, 30)
    (curve,) = attention_figure(mean, "mine").axes[0].lines
    assert curve.get_xdata().tolist() == [*range(30)]
    assert curve.get_ydata().tolist() == mean.weights_LHW[0, 0].tolist()
    for scale in ("linear", "log"):
        edges = bin_edges(5000, scale)  # type: ignore[arg-type]
        assert (edges[0], edges[-1], len(edges) <= MAX_POINTS + 1) == (0, 5000, True)
    assert bin_edges(5000, "log")[:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_command(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, numbers = tmp_path / "a.png", tmp_path / "a.json"
    assert (
        main(["attention", str(run.path), "--tokens", "200", "--out", str(out), "--json", str(numbers)]) == 0
    )
    shown = capsys.readouterr().out
    assert "over 200 tokens of the valid split of" in shown
    report = json.loads(numbers.read_text())
    assert report["tokens"] == 200
    assert [len(layer["heads"]) for layer in report["layers"]] == [2, 2]
    rows = [line.split() for line in shown.splitlines() if "blocks." in line]
    heads = [head for layer in report["layers"] for head in layer["heads"]]
    assert len(rows) == len(heads) == 4
    for row, head in zip(rows, heads, strict=True):
        assert float(row[3]) == pytest.approx(head["mean_distance"], abs=0.06)
        assert [int(word) for word in row[4:6]] == [head["reach_50"], head["reach_90"]]
        assert sum(head["weights"]) == pytest.approx(1, abs=1e-4)
        assert head["weights"][0] == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "a.png exists already" in complaint(capsys, "attention", run.path, "--out", out)
    assert "a.json exists already" in complaint(capsys, "attention", run.path, "--json", numbers)


def test_text_of_a_file_and_of_standard_input(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "some other text\nwith \udcff in it"
    (tmp_path / "other.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    found = []
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    for number, source in enumerate((str(tmp_path / "other.txt"), "-")):
        numbers = tmp_path / f"{number}.json"
        assert main(["attention", str(run.path), source, "--json", str(numbers)]) == 0
        found.append(json.loads(numbers.read_text()))
    assert found[0]["tokens"] == len(text)
    assert found[0]["layers"] == found[1]["layers"]
    assert found[1]["text"] == "standard input"
    assert "over 28 tokens of standard input" in capsys.readouterr().out


def test_files_are_written_before_a_pipe_can_close(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("longspan.cli.attention.show_table", closed)
    out, numbers = tmp_path / "a.svg", tmp_path / "a.json"
    argv = ["attention", str(run.path), "--tokens", "20", "--out", str(out), "--json", str(numbers)]
    assert main(argv) == 130
    assert out.is_file()
    assert json.loads(numbers.read_text())["tokens"] == 20


def test_a_model_without_attention(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = dataclasses.replace(loaded("sha-rnn, no attention"), tokenizer=ByteTokenizer())
    monkeypatch.setattr(without.tokenizer, "encode", lambda text: np.zeros(5, dtype=np.int64))
    monkeypatch.setattr("longspan.language_model.load", lambda *_: without)
    file = run.path / "config.toml"
    for more in ([], ["--token", "2"]):
        assert "this model has no attention" in complaint(capsys, "attention", run.path, file, *more)


def test_weights_at_a_token(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.txt").write_text("abcdefghijklmnop\nqr")
    numbers = tmp_path / "token.json"
    argv = ["attention", str(run.path), str(tmp_path / "other.txt"), "--token", "17", "--json", str(numbers)]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "at token 17 of" in shown
    assert r"'\n'" in shown
    report = json.loads(numbers.read_text())
    assert report["token"] == 17
    for layer in report["layers"]:
        for head in layer["heads"]:
            largest = head["largest"]
            assert 0 < len(largest) <= 10
            assert [one["weight"] for one in largest] == sorted(head["weights"], reverse=True)[: len(largest)]
            for one in largest:
                assert one["position"] == 17 - one["distance"]
                assert one["text"] == repr("abcdefghijklmnop\nqr"[one["position"]])
                assert head["weights"][one["distance"]] == one["weight"]


def test_mistakes_are_one_line(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    usage = ("--tokens must be at least 1", "must end in .png or .svg", "give its file", "leave out --token")
    for words, expected in [
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--out", "a.pdf"], "must end in .png or .svg"),
        (["--scale", "log"], "give its file"),
        (["--out", tmp_path / "b.png", "--token", "3"], "leave out --token"),
        ([tmp_path / "none.txt"], "none.txt"),
        ([tmp_path / "empty.txt"], "no tokens in"),
        ([tmp_path / "text.txt", "--tokens", "5", "--token", "5"], "no token 5 in the first 5 of"),
        ([tmp_path / "text.txt", "--token=-1"], "no token -1"),
    ]:
        status = 2 if expected in usage else 1
        assert expected in complaint(capsys, "attention", run.path, *words, status=status)
    assert not (tmp_path / "b.png").exists()
