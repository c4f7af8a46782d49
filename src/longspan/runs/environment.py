"""Where a run was made: enough to make it again, or to know why it came out differently."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from longspan.errors import UserError
from longspan.kernels.span_attention import cpu
from longspan.version import VERSION

_SOURCES = Path(__file__).resolve().parents[3]  # the checkout, if the package runs from one


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is a GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the meta device has no values
    except (RuntimeError, AssertionError, ImportError):
        raise UserError(f"there is no device '{name}' here; use cpu or auto") from None
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels are launched on the current one
    return device


def device_name(device: torch.device) -> str:
    """What a user calls the device: the model of a GPU, else its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, machine and device, as JSON can hold them. Nothing is compiled to find out."""
    return {
        "longspan": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "attention": _attention(device),
        "git_commit": git_commit(_SOURCES),
    }


def _attention(device: torch.device) -> str:
    """Which backend computes attention, if the model has any."""
    if device.type == "cuda":
        return "kernels"
    return "compiled" if device.type == "cpu" and cpu.can_compile() else "plain torch"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What has changed between two environments that may change the last bits of a result."""
    return [
        f"{name} {before[name]} -> {now[name]}"
        for name in ("torch", "device", "threads", "attention")
        if name in before and before[name] != now[name]
    ]


def git_commit(folder: Path) -> str | None:
    """The commit that `folder` has checked out, if it is the top of a git checkout.

    A folder somewhere below the top may be an installed package in somebody else's project.
    """
    command = ["git", "-C", str(folder), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    top, commit = answer.stdout.splitlines()
    return commit if Path(top).resolve() == folder.resolve() else None
