"""`longspan report`: what is read from run folders, the page, the figures."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from longspan.cli import main, report
from longspan.inspection.report import report_page, run_data, write_report
from longspan.inspection.report.comparison import comparison
from longspan.inspection.report.data import thinned
from longspan.training import train
from tests.training.runs import metrics, outcome, small_config, write_text
from tests.using.test_cli import complaint
from tests.using.tiny import run_folder

HOSTILE = "</script><script>alert(1)</script><!-- & \" ' \ud800"
NAMESPACES = r"http://www\.w3\.org/"


def written(path: Path, *lines: Any) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def folder(path: Path, name: str = "mine", width: int = 8) -> Path:
    """A run of 40 steps, not finished, with everything that a report shows."""
    path.mkdir()
    (path / "config.toml").write_text(
        f"name = {json.dumps(name)}\n[model]\nwidth = {width}\n[model.span]\nramp = 4\n"
        "[[stage]]\nsteps = 50\n"
    )
    train = [
        {"kind": "train", "step": step, "loss": 4 / step, "tokens": 10 * step, "seconds": step / 2}
        for step in (10, 20, 40)
    ]
    valid = {"kind": "valid", "step": 20, "loss": 0.5, "bits_per_byte": 0.25, "best": True, "seconds": 10.0}
    written(path / "metrics.jsonl", *train[:2], valid, train[2])
    written(path / "spans.jsonl", *({"step": s, "limit": 64, "spans": [[4, s], [8, 9]]} for s in (10, 20)))
    search = {"candidates": "sf", "temperature": 0.5, "probabilities": [[0.25, 0.75]]}
    written(path / "architecture.jsonl", {"step": 10} | search)
    written(path / "samples.jsonl", {"step": 10, "text": "hello"})
    written(path / "environment.json", {"torch": "2.11"})
    return path


class Scripts(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.shown = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        else:
            self.shown += data


def test_the_data_are_what_training_wrote(tmp_path: Path) -> None:
    data = run_data(folder(tmp_path / "run"))
    assert (data["name"], data["step"], data["steps"], data["finished"]) == ("mine", 40, 50, False)
    assert (data["tokens"], data["seconds"], data["ramp"]) == (400, 20.0, 4)
    assert data["curves"]["train"][1] == {"step": 20, "loss": 0.2, "tokens": 200, "seconds": 10.0}
    assert data["curves"]["valid"] == [
        {"step": 20, "loss": 0.5, "bits_per_byte": 0.25, "seconds": 10.0, "tokens": 200}
    ]
    assert [moment["spans"] for moment in data["spans"]] == [[[4, 10], [8, 9]], [[4, 20], [8, 9]]]
    assert data["search"][0]["probabilities"] == [[0.25, 0.75]]
    assert data["samples"] == [{"step": 10, "text": "hello"}]
    assert data["score"] == {"valid": {"bits_per_byte": 0.25, "loss": 0.5}}
    assert data["config"]["stage.1.steps"] == "50"
    assert not data["damaged"]


def test_the_page_has_everything_inside(tmp_path: Path) -> None:
    page = report_page([run_data(folder(tmp_path / "run"))])
    found = Scripts(page)
    policy = next(e["content"] for tag, e in found.elements if e.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "eval" not in policy
    assert "'unsafe-inline'" not in policy.partition("style-src")[0]
    assert not [e for _, e in found.elements if e.get("src")]
    assert [e["href"] for _, e in found.elements if e.get("href")] == ["data:,"]
    own = page
    for script in found.scripts[1:4]:  # the libraries, which the policy keeps from any connection
        own = own.replace(script, "")
    assert len(own) < 60_000
    assert not re.findall(rf"https?://(?!{NAMESPACES[7:]})(?!vega\.github\.io/schema/)\S+", own)
    data = json.loads(found.scripts[0])
    assert data["runs"][0]["samples"][0]["text"] == "hello"
    ids = {e["id"] for _, e in found.elements if e.get("id")}
    assert {"spans-slider", "search-play", "samples-text", "curves-x", "curves-from", "curves-to"} <= ids
    labels = {e["for"] for tag, e in found.elements if tag == "label"}
    assert {e["id"] for tag, e in found.elements if tag in ("input", "select")} == labels


def test_a_hostile_run_folder_is_only_text(tmp_path: Path) -> None:
    path = folder(tmp_path / "run<b>&amp;", "</script><script>alert(2)</script>")
    written(path / "samples.jsonl", {"step": 1, "text": HOSTILE})
    written(path / "environment.json", {HOSTILE[:20]: HOSTILE[:40]})
    (path / "plugin.py").write_text("raise SystemExit('executed')")
    config = path / "config.toml"
    config.write_text('plugins = ["plugin"]\n' + config.read_text())
    write_report([path], tmp_path / "page.html")
    found = Scripts((tmp_path / "page.html").read_text())
    usual = Scripts(report_page([run_data(folder(tmp_path / "usual"))]))
    assert len(found.scripts) == len(usual.scripts)
    assert found.scripts[1:] == usual.scripts[1:]
    assert not [tag for tag, _ in found.elements if tag == "b"]
    data = json.loads(found.scripts[0])
    assert data["runs"][0]["samples"][0]["text"] == HOSTILE.replace("\ud800", "?")
    assert "</script><script>alert(2)</script>" in found.shown


DAMAGED = [
    '{"kind": "tra',
    "[" * 100_000,
    '{"kind": "train", "step": "x"}',
    '{"kind": "train", "step": -1}',
    '{"kind": "train", "step": 1' + "0" * 400 + "}",
    "[]",
    "null",
    '"text"',
    "\udcff",
    "x" * (3 << 20),
]


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
@pytest.mark.parametrize("file", ["metrics", "spans", "architecture", "samples"])
def test_a_damaged_line_is_left_out_and_counted(tmp_path: Path, file: str, line: str) -> None:
    path = folder(tmp_path / "run") / f"{file}.jsonl"
    before = run_data(path.parent)
    with path.open("ab") as journal:
        journal.write(line.encode("utf-8", "surrogateescape") + b"\n")
        journal.write(b'{"kind": "train", "st')  # being written
    after = run_data(path.parent)
    assert after.pop("damaged")[f"{file}.jsonl"] >= 1
    before.pop("damaged")
    assert after == before
    assert "damaged lines" in report_page([run_data(path.parent)])


@pytest.mark.parametrize("value", ["1e400", "NaN", '"x"', "null", "true", "[1]", "1" + "0" * 400])
def test_values_that_are_not_numbers_are_not_drawn(tmp_path: Path, value: str) -> None:
    path = folder(tmp_path / "run")
    line = f'{{"kind": "train", "step": 41, "loss": {value}, "tokens": {value}, "seconds": {value}}}\n'
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write(line)
    data = run_data(path)
    assert data["curves"]["train"][-1] == {"step": 41}
    report_page([data])


def test_a_pipe_in_the_folder_is_not_read(tmp_path: Path) -> None:
    path = folder(tmp_path / "run")
    (path / "metrics.jsonl").unlink()
    os.mkfifo(path / "metrics.jsonl")
    assert run_data(path)["curves"] == {"train": [], "valid": []}


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [run_data(folder(tmp_path / name, name, width)) for name, width in (("a", 8), ("b", 16))]
    assert comparison(runs) == [
        ("name", "a", "b"),
        ("model.width", "8", "16"),
        ("valid: bits per byte", "0.2500", "0.2500"),
        ("valid: loss", "0.5000", "0.5000"),
    ]
    page = report_page(runs)
    assert 'id="differences"' in page
    assert 'id="differences"' not in report_page(runs[:1])


def test_long_histories_keep_their_ends() -> None:
    assert thinned([*range(10)], 10) == [*range(10)]
    assert thinned([*range(1001)], 11) == [*range(0, 1001, 100)]


def test_the_command_writes_into_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run")
    for _ in range(2):  # the second time it is replaced
        assert main(["report", str(run.path)]) == 0
        assert capsys.readouterr().out == f"report: {run.path / 'report.html'}\n"
    assert 'id="spans-heatmap"' in (run.path / "report.html").read_text()


@pytest.mark.parametrize(("kind", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("gif", b"GIF89a")])
def test_figures_for_papers(tmp_path: Path, kind: str, begins: bytes) -> None:
    path = folder(tmp_path / "run", r"cost $x_{ \$ </b>")
    assert main(["report", str(path), "--format", kind]) == 0
    picture = path / f"report.{kind}"
    assert picture.read_bytes().startswith(begins)
    if kind == "gif":
        with Image.open(picture) as frames:
            assert frames.n_frames == 2  # type: ignore[attr-defined]


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pages = folder(tmp_path / "run"), list[str]()

    def sleep(seconds: float) -> None:
        pages.append((path / "report.html").read_text())
        if len(pages) == 2:
            with (path / "metrics.jsonl").open("a") as metrics:
                metrics.write('{"kind": "final", "step": 40, "valid": {"bits_per_byte": 0.125}}\n')

    monkeypatch.setattr(report.time, "sleep", sleep)
    assert main(["report", str(path), "--watch"]) == 0
    assert ['"reload_seconds": 5.0' in page for page in pages] == [True, True]
    page = (path / "report.html").read_text()
    assert '"reload_seconds": null' in page
    assert "0.1250 bits per byte" in page


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (str(folder(tmp_path / name)) for name in ("one", "two"))
    taken = tmp_path / "taken.html"
    taken.write_text("mine")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.toml").write_text("name = 'x'\n")
    for words, status, said in [
        ([str(tmp_path / "none")], 1, "there is no run folder"),
        ([str(taken)], 1, "it is a file"),
        ([str(tmp_path)], 1, "not a run folder"),
        ([one, "--out", str(taken)], 1, "exists already"),
        ([one, "--out", str(tmp_path / "no" / "x.html")], 1, "there is no folder"),
        ([one, "--out", "x.png", "--format", "svg"], 2, "must end in .svg"),
        ([one, "--format", "png", "--watch"], 2, "--watch"),
        ([one, two, "--format", "gif"], 2, "one RUN"),
        ([str(empty), "--format", "png"], 1, "nothing to draw"),
        ([str(empty), "--format", "gif"], 1, "no spans"),
    ]:
        assert said in complaint(capsys, "report", *words, status=status)
    assert taken.read_text() == "mine"


def test_training_writes_samples_and_the_report_and_changes_nothing_else(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    plain = train(small_config(text), tmp_path / "plain")
    sampled = train(small_config(text, training__sample_tokens=30), tmp_path / "sampled")
    lines = [json.loads(line) for line in (sampled.path / "samples.jsonl").read_text().splitlines()]
    evaluated = [line["step"] for line in metrics(plain.path) if line["kind"] == "valid"]
    assert [line["step"] for line in lines] == evaluated
    assert all(len(line["text"]) == 30 for line in lines)  # bytes of plain text
    assert len({line["text"] for line in lines}) > 1
    assert not (plain.path / "samples.jsonl").exists()
    after = outcome(sampled.path)
    assert after.pop("samples.jsonl")
    assert after == outcome(plain.path)
    data = json.loads(Scripts((sampled.path / "report.html").read_text()).scripts[0])
    assert len(data["runs"][0]["samples"]) == len(lines)
    assert len(data["runs"][0]["curves"]["valid"]) == len(lines)


def test_training_survives_a_report_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("longspan.training.run.write_report", fail)
    run = train(small_config(write_text(tmp_path)), tmp_path / "run")
    assert run.final() is not None
    assert "the disk is full" in run.log.read_text()
