"""Prompts from the command line, from standard input, or from a file with one prompt per line."""

from __future__ import annotations

import json
import sys
from typing import Any

from longspan.errors import UserError


def prompts(prompt: str, file: str | None) -> list[str]:
    if file is None:
        return [sys.stdin.read() if prompt == "-" else prompt]
    if file == "-":
        text = sys.stdin.read()
    else:
        with open(file, encoding="utf-8", errors="surrogateescape", newline="") as source:
            text = source.read()
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise UserError(f"{file} has no prompts: write one per line")
    if file.endswith(".jsonl"):
        return [_prompt_of(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]
    return [line.removesuffix("\r") for line in lines]


def _prompt_of(line: str, where: str) -> str:
    """A line of a .jsonl file: a text, or an object with a text `prompt`."""
    try:
        value: Any = json.loads(line)
    except ValueError:
        raise UserError(f"{where} is not JSON: write one text or one object with 'prompt' per line") from None
    if isinstance(value, dict):
        value = value.get("prompt")
    if not isinstance(value, str):
        raise UserError(f"{where} has no text 'prompt'")
    return value
