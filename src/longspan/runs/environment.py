"""The environment of a run: versions, machine, device. Needed to reproduce a run or explain differences."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from longspan import distributed
from longspan.errors import UserError
from longspan.kernels.span_attention import cpu
from longspan.version import VERSION

_SOURCES = Path(__file__).resolve().parents[3]  # the checkout, if the package runs from one


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is a GPU if there is one, else the CPU.

    Under torchrun `auto` and `cuda` are a GPU of its own for every process.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if not distributed.launched():
            return torch.device(name)
    if distributed.launched() and name.startswith("cuda"):
        name = _own_gpu(name)
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # fails on the meta device
    except (RuntimeError, AssertionError, ImportError):
        raise UserError(f"there is no device '{name}' on this machine; use cpu or auto") from None
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels are launched on the current device
    return device


def _own_gpu(name: str) -> str:
    processes, gpus = distributed.local_size(), torch.cuda.device_count()
    if name != "cuda":
        if processes > 1:
            raise UserError(f"{processes} processes cannot share {name}: use cuda, which is one GPU for each")
        return name
    if distributed.local_rank() >= gpus > 0:
        raise UserError(
            f"{processes} processes on this machine but {gpus} GPU{'s' * (gpus > 1)}: start torchrun with "
            f"--nproc-per-node {gpus}"
        )
    return f"cuda:{distributed.local_rank()}"


def device_name(device: torch.device) -> str:
    """The product name of a GPU, else the type of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, machine and device, as JSON values. Nothing is compiled for this."""
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
    """Differences between two environments that may change the last bits of a result."""
    return [
        f"{name} {before[name]} -> {now[name]}"
        for name in ("torch", "device", "threads", "attention")
        if name in before and before[name] != now[name]
    ]


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out in `folder`, if it is the top level of a git checkout.

    A folder below the top level may be a package installed inside another project.
    """
    command = ["git", "-C", str(folder), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    top, commit = answer.stdout.splitlines()
    return commit if Path(top).resolve() == folder.resolve() else None
