"""The kernels compile for a GPU, wherever this runs: Triton brings its own assembler."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

KERNELS = ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel", "persistent_gradient_kernel")
QK_NORM_ROPE = ("forward_kernel", "gradient_kernel")
NUMBERS = {"ramp": "fp32", "slope": "fp32", "scale": "fp32", "keep_scale": "fp32", "threshold": "i64"}
POINTERS = {
    "LSE": "*fp32",
    "INNER": "*fp32",
    "HEADS": "*i64",
    "SPANS": "*fp32",
    "SPAN_ENDS": "*fp32",
    "FILLED": "*i64",
    "SEED": "*i32",
}
POINTERS |= {
    "BIAS": "*fp32",
    "DBIAS": "*fp32",
    "DSPAN": "*fp32",
    "DPERSISTENT_K": "*fp32",
    "DPERSISTENT_V": "*fp32",
}
SIZES = ("B", "H", "T", "P")


def compile_kernel(name: str, *, everything: bool, dynamic: bool) -> int:
    """Compile a kernel of attention for compute capability 9.0, as `_size_of` does."""
    from longspan.kernels.span_attention import triton_kernels as kernels

    constants = {"FIRST": 1, "WIDTH": 64 if everything else 40, "BK": 64, "BM": 64, "BN": 32}
    constants |= {"PRECISION": "tf32", "RENORMALISE": True, "DYNAMIC": dynamic}
    return _size_of(getattr(kernels, name), constants, POINTERS, everything)


def compile_qk_norm_rope(name: str, *, everything: bool) -> int:
    from longspan.kernels.qk_norm_rope import triton_kernels as kernels

    width = 64 if everything else 40
    constants = {"WIDTH": width, "E": width // 2, "BE": 32, "BT": 32, "EPSILON": 1e-6}
    constants |= {"NORMED": everything, "ROTATED": everything, "STILL": 16 if everything else 0}
    pointers = {"GAIN": "*fp32", "DGAIN": "*fp32", "FIRST": "*i64", "TURNS": "*fp64"}
    return _size_of(getattr(kernels, name), constants, pointers, everything)


def _size_of(kernel: Any, constants: dict[str, Any], pointers: dict[str, str], everything: bool) -> int:
    """The size of its code, with all its parts or with none."""
    import triton
    from triton.backends.compiler import GPUTarget

    signature, values = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants or argument.startswith(("HAS_", "FOLLOWS", "WHOLE_PERSISTENT")):
            signature[argument] = "constexpr"
            values[(place,)] = constants.get(argument, everything)
        elif argument.isupper() and argument not in SIZES:
            signature[argument] = pointers.get(argument, "*bf16")
        else:
            signature[argument] = NUMBERS.get(argument, "i32")
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=values)
    options = {"num_warps": 4, "num_stages": 2}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return len(compiled.asm["cubin"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("everything", "dynamic"),
    [(True, True), (True, False), (False, False)],
)
def test_every_kernel_compiles(everything: bool, dynamic: bool) -> None:
    """In a process of its own: the interpreter that other tests use takes the compiler's place."""
    program = (
        f"from {__name__} import *\n"
        f"given = dict(everything={everything}, dynamic={dynamic})\n"
        f"for name in KERNELS: assert compile_kernel(name, **given)\n"
        f"for name in QK_NORM_ROPE: assert compile_qk_norm_rope(name, everything={everything})\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
