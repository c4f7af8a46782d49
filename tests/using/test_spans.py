"""The picture of the spans: read from the run folder, as text and as PNG."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from longspan.errors import UserError
from longspan.inspection import SpanHistory, draw_spans, read_spans, spans_as_text
from longspan.runs import RunFolder
from tests.using.tiny import run_folder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return run_folder(tmp_path / "run")


def history(spans_LH: list[list[float]], limit: int) -> SpanHistory:
    return SpanHistory("quickstart", limit, np.array([1200]), np.array([spans_LH], dtype=float))


def test_the_history_is_what_training_wrote(run: RunFolder) -> None:
    found = read_spans(run)
    assert (found.name, found.limit) == ("tiny", 12)
    assert found.steps_N.tolist() == [10, 20, 30]
    assert found.spans_NLH[1].tolist() == [[4, 6], [8, 4]]
    assert found.last_LH.tolist() == [[4, 7], [10, 4]]


def test_layers_go_down_and_heads_across() -> None:
    text = spans_as_text(history([[32, 33, 40], [32, 181, 1024]], 1024))
    assert text.splitlines() == [
        "Learned spans of quickstart after step 1,200, in tokens (limit 1,024)",
        "",
        "layer    mean   head 1  head 2  head 3",
        "    1      35   ▁   32  ▁   33  ▁   40",
        "    2     412   ▁   32  ▄  181  █ 1024",
    ]


def test_many_heads_go_on_in_the_next_line() -> None:
    lines = spans_as_text(history([[float(n) for n in range(1, 13)]], 16)).splitlines()
    assert max(map(len, lines)) <= 80
    assert [int(word) for line in lines[3:] for word in line.split() if word.isdigit()][2:] == [*range(1, 13)]


def test_spans_at_the_limit_have_the_highest_bar_only_if_others_are_shorter() -> None:
    assert "█" not in spans_as_text(history([[16.0, 16.0]], 16))


def test_an_unfinished_last_line_is_passed_over(run: RunFolder) -> None:
    with run.spans.open("a") as file:
        file.write('{"step": 40, "spa')
    assert read_spans(run).steps_N.tolist() == [10, 20, 30]


def test_layers_with_different_numbers_of_heads_are_not_drawn(run: RunFolder) -> None:
    run.spans.write_text('{"step": 5, "limit": 16, "spans": [[4.0, 5.0], [6.0]]}\n')
    with pytest.raises(UserError, match=r"different numbers of heads: read .*spans\.jsonl instead"):
        read_spans(run)


def test_a_damaged_line_is_named(run: RunFolder) -> None:
    lines = run.spans.read_text().splitlines()
    run.spans.write_text("\n".join([lines[0], "{}", lines[2], ""]))
    with pytest.raises(UserError, match=r"line 2 of .*spans\.jsonl is damaged"):
        read_spans(run)


def test_a_run_that_has_none(run: RunFolder, tmp_path: Path) -> None:
    run.spans.unlink()
    with pytest.raises(UserError, match="has no spans to show"):
        read_spans(run)
    run.spans.touch()  # as a model with fixed spans leaves it
    with pytest.raises(UserError, match="if the model learns spans"):
        read_spans(run)


def test_the_limit_is_the_one_training_wrote(run: RunFolder) -> None:
    """A model need not call it what the adaptive-span transformer calls it."""
    run.spans.write_text(run.spans.read_text().replace('"limit": 12', '"limit": 40'))
    assert read_spans(run).limit == 40


@pytest.mark.parametrize(("layers", "heads", "moments"), [(1, 1, 1), (12, 8, 30)])
def test_the_picture_is_a_whole_png(tmp_path: Path, layers: int, heads: int, moments: int) -> None:
    spans_NLH = np.random.default_rng(0).uniform(32, 8192, (moments, layers, heads))
    path = tmp_path / "spans.png"
    draw_spans(SpanHistory("enwik8", 8192, np.arange(moments), spans_NLH), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", data[16:24]) == (1650, 690)
    assert [entry.name for entry in tmp_path.iterdir()] == ["spans.png"]


def test_spans_need_no_checkpoint(run: RunFolder) -> None:
    for which in ("best", "last"):
        run.checkpoint(which).unlink()
    assert json.loads(run.spans.read_text().splitlines()[-1])["step"] == read_spans(run).steps_N[-1]
