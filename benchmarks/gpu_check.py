"""Runs the tests that need a GPU: kernels in every precision, captured steps, resumed runs.

    python benchmarks/gpu_check.py [--workers N] [PYTEST OPTION ...] | tee gpu_check.log

Works from a checkout without installation, in any environment with Longspan's dependencies and pytest. With
pytest-xdist the tests share the GPU, so that kernels are compiled in parallel. The last line has the versions
and the device. The exit status is that of pytest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
TESTS = [
    "tests/kernels/test_dispatch.py",
    "tests/kernels/test_gemv.py",
    "tests/kernels/test_relative_bias.py",
    "tests/kernels/test_qk_norm_rope.py",
    "tests/kernels/test_post_norm.py",
    "tests/models/test_projections.py",
    "tests/output/test_logits.py",
    "tests/evaluation/test_on_gpu.py",
    "tests/training/test_prefetch.py",
    "tests/training/test_modern_run.py",
    "tests/kernels/test_span_attention_gpu.py",
    "tests/models/test_sha_rnn.py",
    "tests/models/test_weight_drop.py",
    "tests/training/test_graphs.py",
    "tests/training/test_gpu.py",
    "tests/training/test_gpu_capture.py",
    "tests/using/test_generation.py",
    "tests/bench/test_cli.py",
]


def main() -> int:
    parser = argparse.ArgumentParser(description="run the tests that need a GPU")
    parser.add_argument("--workers", type=int, default=8, help="tests to run in parallel (with pytest-xdist)")
    args, options = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("gpu_check: torch finds no GPU on this machine", file=sys.stderr)
        return 1
    if importlib.util.find_spec("pytest") is None:
        print("gpu_check: needs pytest: pip install pytest", file=sys.stderr)
        return 1
    parallel = ["-n", str(args.workers)] if importlib.util.find_spec("xdist") else []
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-vvv", "-rfEs", "--durations=10", *parallel, *options, *TESTS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    print(
        f"{'passed' if result.returncode == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s: "
        f"{torch.cuda.get_device_name()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, triton {_version('triton')}"
    )
    return result.returncode


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())
