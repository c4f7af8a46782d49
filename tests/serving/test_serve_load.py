"""The arithmetic of benchmarks/serve_load.py."""

from __future__ import annotations

import json
import math

import pytest

import serve_load
from serve_load import Reply, differing, gaps, parse, percentile, summary


def test_percentiles() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, part) for part in (0, 0.5, 0.99, 0.991, 1)] == [1, 50, 99, 100, 100]
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7
    assert math.isnan(percentile([], 0.5))


def test_gaps() -> None:
    assert gaps([1.0, 1.5, 3.0]) == [0.5, 1.5]
    assert gaps([1.0]) == gaps([]) == []


def test_a_summary() -> None:
    replies = [
        Reply(0, 0, 200, True, [0.1, 0.2, 0.4], ["a", "b", "c"]),
        Reply(1, 0, 200, True, [0.3, 0.35], ["a", "b"]),
        Reply(1, 1, 429, False),
    ]
    found = summary(replies, tokens=500, seconds=2.0)
    assert found == pytest.approx(
        {
            "requests": 3,
            "errors": 1,
            "first_p50_ms": 100,
            "first_p99_ms": 300,
            "between_p50_ms": 100,
            "between_p99_ms": 200,
            "tokens_per_second": 250,
        }
    )


def test_texts_are_compared() -> None:
    alone = [Reply(client, 0, 200, True, [], ["ab", "cd"]) for client in range(5)]
    together = [
        Reply(0, 0, 200, True, [], ["abcd"]),
        Reply(0, 1, 200, True, [], ["another request"]),
        Reply(1, 0, 200, False, [], ["abc"]),  # cut by the end of the time
        Reply(2, 0, 200, True, [], ["abc"]),  # complete, but shorter
        Reply(3, 0, 200, False, [], ["abx"]),
    ]
    assert differing(together, alone) == [2, 3, 4]


def test_a_response_is_taken_apart() -> None:
    def event(text: str) -> bytes:
        return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"

    parts = [b"HTTP/1.1 200 OK\r\n\r\n", b"2a\r\n" + event("a") + event("b") + b"\r\n", event("c")[:9]]
    parts += [event("c")[9:], b"\r\ndata: [DONE]\n\n"]
    arrived = [(10.0 + number, len(b"".join(parts[: number + 1]))) for number in range(5)]
    times, texts, complete = parse(b"".join(parts), arrived, 9.5)
    assert (times, texts, complete) == ([1.5, 1.5, 3.5], ["a", "b", "c"], True)
    assert parse(b"".join(parts[:3]), arrived[:3], 9.5) == ([1.5, 1.5], ["a", "b"], False)


def test_every_request_has_its_own_prompt_and_seed() -> None:
    plan = serve_load.Plan("127.0.0.1:1", "m", 256, 2, 1.0, 5, 8, False)
    bodies = [
        json.loads(serve_load.request(plan, client, number).partition(b"\r\n\r\n")[2])
        for client in range(2)
        for number in range(2)
    ]
    assert len({body["seed"] for body in bodies}) == len({str(body["prompt"]) for body in bodies}) == 4
    assert all(len(body["prompt"]) == 8 and max(body["prompt"]) < 256 for body in bodies)
