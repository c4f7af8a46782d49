"""How the kernels for short windows are laid out over a GPU; `test_fused.py` tests what they compute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from longspan.kernels.span_attention import short

H200 = SimpleNamespace(shared_memory_per_multiprocessor=228 * 1024, multi_processor_count=132)
A100 = SimpleNamespace(shared_memory_per_multiprocessor=164 * 1024, multi_processor_count=108)
BANDS = range(32, short.LONGEST + 32, 16)


def programs_of(texts: int, steps: int, taken: int) -> int:
    return texts * -(-steps // taken)


def test_programs_take_whole_texts_where_these_fill_the_gpu() -> None:
    assert short._steps(512, 4, 264) == 4
    assert short._steps(64, 32, 264) == 8
    assert programs_of(64, 32, 8) <= 264 < programs_of(64, 32, 7)


def test_a_single_text_is_cut_into_as_many_programs_as_help() -> None:
    assert short._steps(1, 32, 264) == 1
    assert short._steps(1, 1, 264) == 1


@pytest.mark.parametrize("band", BANDS)
def test_two_programs_of_the_forward_pass_find_room_on_a_multiprocessor(band: int) -> None:
    ring = short._ring(band, H200)
    assert ring % short.BATCH == 0
    assert ring >= band - 16 + short.STEP, "what a step sees"
    assert short._programs_at_a_time(band, H200) == 264


def test_where_there_is_room_for_one_program_only_it_takes_more() -> None:
    assert short._programs_at_a_time(48, A100) == 216
    assert short._programs_at_a_time(128, A100) == 108


@pytest.mark.parametrize("band", BANDS)
def test_the_ring_is_no_larger_than_two_steps_need(band: int) -> None:
    assert short._ring(band, H200) <= band - 16 + 2 * short.STEP


@pytest.mark.parametrize(("window", "band"), [(1, 32), (16, 32), (17, 48), (112, 128), (160, 176)])
def test_16_queries_see_a_window_and_their_own_positions(window: int, band: int) -> None:
    assert short._band(window) == band
