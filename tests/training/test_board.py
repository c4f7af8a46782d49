"""TensorBoard: what a run shows there besides curves, read back from its event files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longspan.training import board as boards
from longspan.training.board import Board, heat_map

SPANS = "spans/layers_down_heads_across"
SEARCH = "search/candidates_down_blocks_across"


def events_of(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    return events


def pixels(data: bytes) -> np.ndarray:
    """One pixel of every cell."""
    image = np.asarray(Image.open(io.BytesIO(data)))
    return image[boards._CELL // 2 :: boards._CELL, boards._CELL // 2 :: boards._CELL]


def test_a_run_shows_its_spans(uninterrupted: Path) -> None:
    lines = [json.loads(line) for line in (uninterrupted / "spans.jsonl").read_text().splitlines()]
    images = events_of(uninterrupted / "tensorboard").Images(SPANS)
    assert [image.step for image in images] == [line["step"] for line in lines]
    for image, line in zip(images, lines, strict=True):
        wanted = np.log2(np.maximum(line["spans"], 1)) / np.log2(line["limit"])
        assert (
            pixels(image.encoded_image_string) == heat_map(wanted)[:: boards._CELL, :: boards._CELL]
        ).all()


def test_samples_and_a_search(tmp_path: Path) -> None:
    board = Board(tmp_path, 0)
    board.write_record("samples", 5, {"text": "# no title\n<b>\n"})
    board.write_record("architecture", 5, {"candidates": "sf", "probabilities": [[0.0, 1.0], [0.5, 0.5]]})
    board.write_record("spans", 5, {"limit": 16, "spans": [[16.0, 1.0], [4.0]]})
    board.close()
    events = events_of(tmp_path)
    (text,) = events.Tensors("samples/text_summary")
    assert text.step == 5
    assert text.tensor_proto.string_val[0].decode() == "    # no title\n    <b>\n    "
    found = pixels(events.Images(SEARCH)[0].encoded_image_string)
    low, middle, high = boards._COLOURS[[0, 2, 4]]
    assert (found == [[low, middle], [high, middle]]).all()  # candidates down, blocks across
    found = pixels(events.Images(SPANS)[0].encoded_image_string)
    assert (found == [[high, low], [middle, [128] * 3]]).all()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("spans", {"limit": 16, "spans": "none"}),
        ("spans", {"limit": 1, "spans": [[1.0]]}),
        ("spans", {"layer.0": {"spans": [[1.0]]}}),
        ("architecture", {"probabilities": [["a"]]}),
        ("architecture", {"probabilities": []}),
        ("samples", {"text": 3}),
        ("own", {"values": [[1.0]]}),
    ],
)
def test_other_records_are_left_out(tmp_path: Path, name: str, fields: dict[str, object]) -> None:
    board = Board(tmp_path, 0)
    board.write_record(name, 1, fields)
    board.close()
    tags = events_of(tmp_path).Tags()
    assert not tags["images"]
    assert not tags["tensors"]


def test_a_large_map_is_cut() -> None:
    assert heat_map(np.zeros((400, 2))).shape == (boards._LARGEST * boards._CELL, 2 * boards._CELL, 3)
