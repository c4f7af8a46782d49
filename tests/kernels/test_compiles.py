"""Kernels that Triton's interpreter runs can still be refused by its compiler: it needs no GPU to say so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from longspan.kernels import gemv, post_norm
from longspan.kernels.span_attention import decode_gpu, relative_bias

POINTERS = {"HEADS": "*i64", "COUNTS": "*i64", "SEED": "*i32"}
POINTERS |= dict.fromkeys(("SPANS", "SUMS", "FOUND", "STATS"), "*fp32")
NUMBERS = ("scale", "keep_scale", "epsilon", "ramp")

def build(kernel, **constants):
    kinds = {}
    for name in kernel.arg_names:
        pointer = name.isupper() and name not in "TH"
        kinds[name] = POINTERS.get(name, "*bf16") if pointer else "fp32" if name in NUMBERS else "i32"
        if name in constants:
            kinds[name] = "constexpr"
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compile(ASTSource(kernel, kinds, places), target=GPUTarget("cuda", 90, 32))

sizes = {"WIDTH": 48, "BK": 64}
build(decode_gpu._join_kernel, MOST=4, RENORMALISE=True, **sizes)
build(decode_gpu._join_kernel, MOST=1, RENORMALISE=False, **sizes)
tile = {"BM": 64, "BN": 64, "PRECISION": "tf32", **sizes}
build(relative_bias._table_kernel, FIRST=1, **tile)
build(relative_bias._query_kernel, FIRST=0, **tile)
build(relative_bias._key_kernel, **tile)
build(relative_bias._sum_kernel, SHARED=True, FIRST=1, BD=32, **sizes)
build(gemv._product_kernel, HAS_BIAS=True, HAS_ONTO=True, SQUARED_RELU=False, BE=1, BD=2048)
narrow = {"BE": 64, "BD": 32, "BIAS": None, "ONTO": None}
build(gemv._product_kernel, HAS_BIAS=False, HAS_ONTO=False, SQUARED_RELU=True, **narrow)
row = {"BN": 4, "BD": 512}
build(post_norm._norm_kernel, HAS_DROPOUT=True, **row)
build(post_norm._norm_kernel, HAS_DROPOUT=True, threshold=1, **row)
build(post_norm._norm_gradient_kernel, HAS_DROPOUT=True, HAS_DOUT=True, **row)
build(post_norm._norm_gradient_kernel, HAS_DROPOUT=False, HAS_DOUT=False, SEED=None, DOUT=None, **row)
build(post_norm._relu_kernel, HAS_DROPOUT=True, BLOCK=2048)
build(post_norm._relu_kernel, HAS_DROPOUT=True, BLOCK=2048, threshold=1)  # as Triton does with a 1
build(post_norm._relu_gradient_kernel, BN=16, BE=256)
build(post_norm._total_kernel, BP=64, BD=32)
given = ("HAS_SPANS", "HAS_POSITIONS", "HAS_CONTENT_BIAS", "HAS_POSITION_BIAS")
given += ("HAS_PERSISTENT", "HAS_FILLED")
everything = dict.fromkeys(given, True)
build(decode_gpu._part_kernel, BN=64, FIRST=0, **everything, **sizes)
nothing = dict.fromkeys(given, False) | dict.fromkeys(
    ("SPANS", "POSITION_KEYS", "CONTENT_BIAS", "POSITION_BIAS", "PERSISTENT_K", "PERSISTENT_V")
)
build(decode_gpu._part_kernel, BN=64, FIRST=1, **nothing, **sizes)
"""


@pytest.mark.slow
def test_tables_steps_of_decoding_and_post_norm(tmp_path: object) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
