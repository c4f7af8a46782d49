"""`longspan inspect` and `longspan score`: values, output, pages, constant memory."""

from __future__ import annotations

import gc
import io
import json
import math
import re
import resource
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longspan import load
from longspan.cli import main
from longspan.config import EvaluationConfig
from longspan.evaluation import evaluate
from longspan.inspection.surprise import Totals, inspect_blocks
from longspan.runs import RunFolder
from tests.inspection.test_report import Scripts
from tests.using.test_cli import complaint
from tests.using.tiny import run_folder, token_file

TEXT = "def f(x):\n    return x + 1\n" * 30  # more than one block of 512 tokens


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return run_folder(tmp_path / "run")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "my.txt"
    path.write_text(TEXT)
    return path


def json_lines(capsys: pytest.CaptureFixture[str], *argv: object) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_bits_are_those_of_the_evaluation(
    run: RunFolder, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *tokens, total = json_lines(capsys, "inspect", run.path, text, "--json")
    lm = load(run.path)
    file = token_file(tmp_path / "tokens", b"\n" + TEXT.encode())  # the first token is not scored
    score = evaluate(
        lm.model,
        file,
        tokenizer=lm.tokenizer,
        config=EvaluationConfig(batch_size=1),
        block_length=128,
        device="cpu",
    )
    assert len(tokens) == total["tokens"] == score.tokens == len(TEXT)
    bits = [float(str(token["bits"])) for token in tokens]
    assert math.fsum(bits) == pytest.approx(score.nats / math.log(2), rel=1e-5)
    assert total["bits_per_byte"] == pytest.approx(score.bits_per_byte, rel=1e-5)
    nats = lm.score(TEXT).token_nats
    assert bits == pytest.approx([one / math.log(2) for one in nats], rel=1e-6)
    assert "".join(str(token["text"]) for token in tokens) == TEXT


def test_distances_are_those_of_the_attention(run: RunFolder) -> None:
    lm = load(run.path)
    ids = lm.tokenizer.encode(TEXT)
    totals, start = Totals(), lm.read("")
    blocks = list(inspect_blocks(lm.model, [ids[:100], ids[100:]], start, totals, largest=2))
    assert [len(block.ids) for block in blocks] == [512, len(TEXT) - 512]
    whole = lm.attention(TEXT, start)
    for number, layer in enumerate(whole):
        for at in (0, 5, 511, 512, 700):
            block = blocks[at // 512]
            for head in range(2):
                weights = layer.weights_HTW[head, at].tolist()
                mean = sum(d * w for d, w in enumerate(weights)) / sum(weights)
                held, far = 0.0, -1
                while held < 0.9 * sum(weights) * (1 - 1e-9):
                    far += 1
                    held += weights[far]
                found, place = block.layers[number], at % 512
                assert found.mean_HT[head, place] == pytest.approx(mean, rel=1e-5)
                assert found.reach_HT[head, place] == far
                best = max(range(len(weights)), key=weights.__getitem__)
                assert found.top_weights_HTK[head, place, 0] == pytest.approx(weights[best])
    mean_attention, other = totals.attention(), lm.mean_attention(TEXT, start)
    assert mean_attention is not None
    torch.testing.assert_close(mean_attention.mean_distance_LH, other.mean_distance_LH)


def test_longer_blocks_have_the_same_bits(run: RunFolder) -> None:
    lm, text = load(run.path), TEXT * 7
    ids = lm.tokenizer.encode(text)
    totals = Totals()
    blocks = list(
        inspect_blocks(lm.model, [ids[:3000], ids[3000:]], lm.read(""), totals, attention_tokens=600)
    )
    assert [len(block.ids) for block in blocks] == [512, 512, 2048, 2048, len(text) - 5120]
    assert [bool(block.layers) for block in blocks] == [True, True, False, False, False]
    nats = [one * math.log(2) for block in blocks for one in block.bits]
    assert nats == pytest.approx(lm.score(text).token_nats, rel=1e-5)
    lm.model.vocabulary_size = 1 << 20  # its logits would take much memory
    blocks = list(inspect_blocks(lm.model, [ids], lm.read(""), Totals(), attention_tokens=0))
    assert {len(block.ids) for block in blocks[:-1]} == {512}


def test_the_terminal_shows_text_totals_and_weights(
    run: RunFolder, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run.path), str(text), "--tokens", "27", "--token", "40"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(TEXT[:26])
    assert f"{len(TEXT):,} bytes, {len(TEXT):,} tokens" in out
    assert "attention over the first 810 tokens" in out
    assert "token 40, " in out
    assert "\x1b" not in out  # not a terminal


def test_attention_is_measured_as_far_as_asked(
    run: RunFolder, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *tokens, total = json_lines(capsys, "inspect", run.path, text, "--json", "--attention-tokens", 10)
    assert total["attention_tokens"] == 512  # whole blocks
    assert "reach_90" in tokens[511]
    assert "reach_90" not in tokens[512]
    *_, total = json_lines(capsys, "inspect", run.path, text, "--json", "--attention-tokens", 0)
    assert total["layers"] == []


def test_standard_input(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"abc\xff")))
    *tokens, total = json_lines(capsys, "inspect", run.path, "-", "--json")
    assert [token["text"] for token in tokens] == ["a", "b", "c", "\\xff"]
    assert total["text"] == "standard input"


def test_the_page_shows_the_first_tokens_and_says_so(run: RunFolder, tmp_path: Path) -> None:
    hostile = tmp_path / "a<b>.txt"
    hostile.write_text("</script><script>alert(1)</script>" * 5)
    page = tmp_path / "page.html"
    assert main(["inspect", str(run.path), str(hostile), "--html", str(page), "--tokens", "60"]) == 0
    found = Scripts(page.read_text())
    assert len(found.scripts) == 3
    assert not [tag for tag, _ in found.elements if tag == "b"]
    assert "Only the first 60 of 170 tokens are shown." in found.shown
    data = json.loads(found.scripts[0])
    assert (
        "".join(token["text"] for token in data["tokens"]) == ("</script><script>alert(1)</script>" * 5)[:60]
    )
    assert len(data["tokens"][20]["top"]) == 2
    assert not re.findall(r"https?://", page.read_text())


def test_score_is_one_line_a_file(
    run: RunFolder, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, empty = tmp_path / "other.txt", tmp_path / "empty.txt"
    other.write_text("grüße\n")
    empty.write_text("")
    lm = load(run.path)
    assert main(["score", str(run.path), str(text), str(other), str(empty)]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        [str(text), "810", "810", f"{lm.score(TEXT).bits_per_byte:.4f}"],
        [str(other), "8", "8", f"{lm.score('grüße' + chr(10)).bits_per_byte:.4f}"],
        [str(empty), "0", "0", "-"],
    ]
    first, *_ = json_lines(capsys, "score", run.path, text, "--json")
    assert first["bits_per_byte"] == pytest.approx(lm.score(TEXT).bits_per_byte)


def test_memory_does_not_grow_with_the_text(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.cli.text_input.CHUNK_BYTES", 1 << 11)
    peaks = []
    for size in (1 << 12, 1 << 12, 1 << 15):  # the first is for what Python keeps
        path = tmp_path / f"{size}.txt"
        path.write_bytes(b"0" * size)
        tracemalloc.start()
        main(["inspect", str(run.path), str(path), "--tokens", "10", "--attention-tokens", "512", "--quiet"])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # A list of the bits alone would need 900,000 bytes more; autograd keeps some bytes of every call.
    assert peaks[2] < peaks[1] + (1 << 18)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells the resident memory")
@pytest.mark.parametrize("more", [["--json"], ["--html"]])
def test_resident_memory_does_not_grow_with_the_text(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.setattr("sys.stdout", (tmp_path / "out").open("w"))  # a captured text would count too
    monkeypatch.setattr("longspan.cli.text_input.CHUNK_BYTES", 1 << 12)
    path, resident, sizes = tmp_path / "long.txt", list[int](), list[int]()
    for count, size in enumerate((20_000, 20_000, 180_000)):  # the first is for what is made only once
        path.write_bytes(b"0123456789" * (size // 10))
        page = tmp_path / f"{count}.html"
        words = [*more, str(page)] if more == ["--html"] else more
        assert main(["inspect", str(run.path), str(path), "--attention-tokens", "512", *words]) == 0
        gc.collect()
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
        sizes.append(page.stat().st_size if page.exists() else 0)
    # The bits alone, as Python's numbers, would be 5 MB more.
    assert resident[2] - resident[1] < 4e6
    assert sizes[2] <= sizes[1] + 500


def test_the_most_surprising_parts_are_those_of_the_whole_text(
    run: RunFolder, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *tokens, total = json_lines(capsys, "inspect", run.path, text, "--json", "--tokens", "10")
    bits = [float(str(token["bits"])) for token in tokens]
    starts = [*range(0, 512, 64), *range(512, len(TEXT) - 63, 64)]
    means = {start: sum(bits[start : start + 64]) / 64 for start in starts}
    parts = total["surprising"]
    assert isinstance(parts, list)
    assert [part["token"] for part in parts] == sorted(starts, key=lambda start: -means[start])[:20]
    assert parts[0]["text"] == TEXT[parts[0]["token"] :][:64]
    assert parts[0]["bits_per_token"] == pytest.approx(means[parts[0]["token"]])
    page = tmp_path / "page.html"
    assert main(["inspect", str(run.path), str(text), "--html", str(page), "--tokens", "10"]) == 0
    assert "most surprising parts, of 64 tokens each" in capsys.readouterr().out
    assert "Most surprising parts" in Scripts(page.read_text()).shown


def test_a_page_shows_attention_for_so_many_tokens_only(
    run: RunFolder, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.cli.inspect_.MOST_HEADS", 4 * 100)  # the model has four heads
    page = tmp_path / "page.html"
    assert main(["inspect", str(run.path), str(text), "--html", str(page), "--tokens", "300"]) == 0
    found = Scripts(page.read_text())
    tokens = json.loads(found.scripts[0])["tokens"]
    assert [("top" in token, "mean_distance" in token) for token in tokens] == (
        [(True, True)] * 100 + [(False, False)] * 200
    )
    assert "Attention is shown for the first 100 of them." in found.shown


def test_mistakes_are_one_line(
    run: RunFolder, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for words, status, said in [
        (["inspect", run.path, tmp_path / "none"], 1, "there is no file"),
        (["inspect", run.path, tmp_path], 1, "is a folder"),
        (["inspect", run.path, empty], 1, "no tokens"),
        (["inspect", run.path, text, "--tokens", "-1"], 2, "--tokens"),
        (["inspect", run.path, text, "--tokens", "100001"], 2, "at most 100,000"),
        (["inspect", run.path, text, "--token", "810", "--tokens", "0"], 1, "there is no token 810"),
        (["inspect", run.path, text, "--html", text], 1, "exists already"),
        (["inspect", tmp_path, text], 1, "not a run folder"),
        (["score", run.path, text, tmp_path / "none"], 1, "there is no file"),
        (["score", run.path], 2, "FILE"),
    ]:
        assert said in complaint(capsys, *words, status=status)
