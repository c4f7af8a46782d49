"""What several seeds of a race say together: mean and spread of every entrant."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from longspan.errors import UserError


def seeds_of(text: str) -> tuple[int, ...]:
    """`1,2,3` as numbers, in this order."""
    try:
        seeds = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UserError(f"--seed is a number or several with commas, as in 1,2,3, not '{text}'") from None
    if min(seeds) < 0 or max(seeds) >= 2**63 or len({*seeds}) < len(seeds):
        raise UserError(f"the seeds must be different, not negative and below 2^63: {text}")
    return seeds


def readable(line: dict[str, Any]) -> str:
    """One result in a line for people."""
    peak = line["peak_memory_bytes"]
    memory = "" if peak is None else f", {peak / 2**30:.2f} GiB"
    return (
        f"{line['name']}, seed {line['seed']}: {line['bits_per_byte']:.4f} bits per byte after "
        f"{line['steps']:,} steps, {line['tokens_per_second']:,.0f} tokens/s{memory}"
    )


def summary(runs: Sequence[Sequence[dict[str, Any]]], part: str) -> dict[str, Any]:
    """Of the result lines of every entrant, one per seed; `spread` is the standard deviation (n - 1)."""
    return {"summary": [_entrant(lines) for lines in runs], "part": part}


def _entrant(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    bits = [line["bits_per_byte"] for line in lines]
    peaks = [line["peak_memory_bytes"] for line in lines if line["peak_memory_bytes"] is not None]
    return {
        "name": lines[0]["name"],
        "seeds": [line["seed"] for line in lines],
        "mean": statistics.fmean(bits),
        "spread": statistics.stdev(bits) if len(bits) > 1 else None,
        "best": min(bits),
        "worst": max(bits),
        "bits_per_byte": bits,
        "steps": statistics.fmean(line["steps"] for line in lines),
        "tokens_per_second": statistics.fmean(line["tokens_per_second"] for line in lines),
        "peak_memory_bytes": max(peaks, default=None),
        "parameters": lines[0]["parameters"],
        "config": lines[0].get("config"),
    }
