"""Lines of metrics: as JSON has them and as people read them."""

from __future__ import annotations

from typing import Any


def readable(line: dict[str, Any]) -> str:
    """A line of training or validation metrics, short enough for one row of a terminal."""
    measure = f"loss {line['loss']:.4f}"
    if "bits_per_byte" in line:  # tokens may stand for no byte at all
        measure += f"  {line['bits_per_byte']:.4f} bits/byte"
    if line["kind"] == "valid":
        best = "  (best so far)" if line["best"] else ""
        if "soft" in line:
            measure += f"  as {line['pattern']} (soft: {line['soft']['loss']:.4f})"
        return f"step {line['step']:,}  held-out {measure}  over {line['tokens']:,} tokens{best}"
    spans = f"  span {line['span_mean']:.0f} (max {line['span_max']:.0f})" if "span_mean" in line else ""
    pattern = f"  {line['pattern']} at temperature {line['temperature']:.2f}" if "pattern" in line else ""
    return (
        f"step {line['step']:,}  {measure}  lr {line['learning_rate']:.3g}"
        f"  {line['tokens_per_second']:,.0f} tokens/s{spans}{pattern}"
    )


def duration(seconds: float) -> str:
    """1:05 or 2:03:04."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
