"""Span attention of heads that look over a short window, on an NVIDIA GPU: the kernels beside this file.

They make the term for the distance themselves, so there is no table of it. NVRTC, which comes with torch,
compiles them when a window is first asked for; `takes` says what they are for. The rest is for Triton.

Shapes: as in the package.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

WIDTH = 64
"""Of a head."""

LONGEST = 160
"""The longest window that was measured."""

TILE = 64
"""Queries, or keys, of a program of the gradients."""

STEP = 128
"""Queries of a program of the forward pass, which goes on with further ones of the same text and head."""

BATCH = 32
"""Rows that it loads at once."""

PROGRAMS = 2
"""Of the gradient of queries, at a time on a multiprocessor: each of them goes on with further tiles."""

FILES = {"forward.cu": ["forward"], "backward.cu": ["query_gradient", "key_gradient", "sums"]}
"""With their kernels; `source` says what goes before each."""

HALVES = {torch.bfloat16: "bf16", torch.float16: "f16"}

_FOLDER = Path(__file__).parent
_SHARED_MEMORY = 8  # the attribute of a function that says how much of it there may be


class Options(NamedTuple):
    """What is the same for all heads."""

    ramp: int
    first_distance: int
    dropout: float
    windows_follow_spans: bool

    def numbers(self) -> list[Any]:
        ramp, slope, scale = (ctypes.c_float(x) for x in (self.ramp, 1 / self.ramp, 1 / math.sqrt(WIDTH)))
        return [ramp, slope, scale, ctypes.c_uint(int(self.dropout * 2**32)), self.keep_scale()]

    def keep_scale(self) -> ctypes.c_float:
        return ctypes.c_float(1 / (1 - self.dropout))


class Given(NamedTuple):
    """What goes in; `past` and `heads` as in `triton_kernels.py`, a seed for dropout."""

    q_BHTK: Tensor
    k_BHTK: Tensor
    v_BHTK: Tensor
    past: Tensor
    position_keys: Tensor
    heads: Tensor
    spans_H: Tensor
    seed: Tensor | None


def takes(given: Given, longest_window: int, options: Options) -> bool:
    """Whether there are kernels for these queries, keys, values and position keys."""
    q_BHTK, position_keys = given.q_BHTK, given.position_keys
    batch, heads, block, width = q_BHTK.shape
    fits = q_BHTK.is_cuda and q_BHTK.dtype in HALVES and width == WIDTH and block % TILE == 0
    fits = fits and position_keys.dim() == 2 and longest_window <= LONGEST and 0 < batch * heads < 2**16
    fits = fits and block > 0 and options.first_distance in (0, 1)
    rows = (q_BHTK, given.k_BHTK, given.v_BHTK, given.past, position_keys)
    if not fits or torch.version.hip is not None or not all(map(_lies_well, rows)):
        return False
    gpu = torch.cuda.get_device_properties(q_BHTK.device)
    room = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]
    band = _band(longest_window)
    if gpu.major < 8 or max(_query_shared_memory(band), _forward_shared_memory(band, gpu)) > room:
        return False
    return _kernels(q_BHTK, longest_window, options) is not None


def forward(given: Given, out_BHTK: Tensor, longest_window: int, options: Options) -> Tensor:
    """Write `out` and give the logarithms of the totals, [B, H, T]."""
    q_BHTK, k_BHTK, v_BHTK, past, position_keys, heads, spans_H, seed = given
    batch, num_heads, block, _ = q_BHTK.shape
    lse_BHT = q_BHTK.new_empty(batch, num_heads, block, dtype=torch.float32)
    kernels, band = _kernels(q_BHTK, longest_window, options), _band(longest_window)
    assert kernels is not None, "asked before"
    gpu = torch.cuda.get_device_properties(q_BHTK.device)
    steps = _steps(batch * num_heads, -(-block // STEP), _programs_at_a_time(band, gpu))
    kernels["forward"](
        (-(-block // (steps * STEP)), batch, num_heads),
        q_BHTK, k_BHTK, v_BHTK, past, position_keys, out_BHTK, lse_BHT, heads, spans_H, seed,
        *_strides(q_BHTK, k_BHTK, v_BHTK, out_BHTK),
        num_heads, block, len(position_keys), _ring(band, gpu), steps,
        options.windows_follow_spans, *options.numbers(),
    )  # fmt: skip
    return lse_BHT


@cache
def _steps(texts: int, steps: int, programs: int) -> int:
    """How many steps of a text a program of the forward pass takes, if so many programs run at a time.

    It takes as long as they do, and about one more for the keys and values before them.
    """

    def duration(taken: int) -> int:
        return -(-texts * -(-steps // taken) // programs) * (taken + 1)

    return min(range(1, steps + 1), key=duration)


class Sums(NamedTuple):
    """Gradients that are sums over queries."""

    position_keys: Tensor
    spans_H: Tensor


def backward(
    dout_BHTK: Tensor,
    given: Given,
    out_BHTK: Tensor,
    lse_BHT: Tensor,
    dqkv_BHTK: Sequence[Tensor],
    dpast: Tensor | None,
    longest_window: int,
    longest_reach: int,
    options: Options,
) -> Sums:
    """Write the gradients of queries, keys and values, and of the past if it is not None; give the others."""
    q_BHTK, k_BHTK, v_BHTK, past, position_keys, heads, spans_H, seed = given
    dq_BHTK, dk_BHTK, dv_BHTK = dqkv_BHTK
    if not _lies_well(dout_BHTK):
        dout_BHTK = dout_BHTK.clone(memory_format=torch.contiguous_format)
    batch, num_heads, block, _ = q_BHTK.shape
    sizes = (batch, num_heads, block)
    kernels, band = _kernels(q_BHTK, longest_window, options), _band(longest_window)
    assert kernels is not None, "asked before"
    gpu = torch.cuda.get_device_properties(q_BHTK.device)
    programs = min(batch * num_heads * block // TILE, PROGRAMS * gpu.multi_processor_count)
    # Of 16 queries and 16 keys the weights, and the gradients of the scores.
    kept = q_BHTK.new_empty(batch * num_heads * (block // 16) * (band // 16) * 512)
    dspans = lse_BHT.new_empty(num_heads, batch, block // 16)
    dposition_keys = lse_BHT.new_empty(programs, band - 16, WIDTH)
    follows = options.windows_follow_spans
    kernels["query_gradient"](
        (programs,),
        q_BHTK, k_BHTK, v_BHTK, past, position_keys, out_BHTK, dout_BHTK, lse_BHT, heads, spans_H, seed,
        dq_BHTK, kept, dspans, dposition_keys,
        *_strides(q_BHTK, k_BHTK, v_BHTK, out_BHTK, dout_BHTK, dq_BHTK),
        *sizes, len(position_keys), follows, *options.numbers(),
    )  # fmt: skip
    ramp, _, scale, *_ = options.numbers()
    tiles = block // TILE + (0 if dpast is None else -(-longest_reach // TILE))
    kernels["key_gradient"](
        (tiles, batch * num_heads),
        q_BHTK, dout_BHTK, kept, heads, spans_H, dk_BHTK, dv_BHTK, dpast,
        *_strides(q_BHTK, dout_BHTK, dk_BHTK, dv_BHTK),
        *sizes, follows, ramp, scale, options.keep_scale(),
    )  # fmt: skip
    sums = Sums(lse_BHT.new_empty(position_keys.shape), lse_BHT.new_empty(num_heads))
    kernels["sums"](
        (sums.position_keys.numel() // 32 + num_heads,),
        dposition_keys, dspans, sums.position_keys, sums.spans_H,
        programs, dspans[0].numel(), sums.position_keys.numel(), scale,
    )  # fmt: skip
    return sums


def _lies_well(x: Tensor) -> bool:
    """Whether rows begin where 16 bytes can be read at once."""
    return x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and all(step % 8 == 0 for step in x.stride()[:-1])


def _strides(*tensors_BHTK: Tensor) -> list[ctypes.c_longlong]:
    return [ctypes.c_longlong(tensor.stride(dim)) for tensor in tensors_BHTK for dim in range(3)]


def _band(longest_window: int) -> int:
    """Keys that 16 queries see, in pieces of 16."""
    return -(-longest_window // 16) * 16 + 16


def _query_shared_memory(band: int) -> int:
    """Bytes of a program of the queries' gradient: keys, values, position keys, distances of four warps."""
    distances = max(16 * (band - 8) * 2, 32 * 128) + 64
    return 2 * _rows(band) + (band - 16) * 128 + 4 * distances


def _rows(band: int) -> int:
    """Bytes of the keys that a program's queries see, or the other way round."""
    return (band + TILE - 16) * 128


def _ring(band: int, gpu: Any) -> int:
    """Rows of keys, and of values, that a program of the forward pass keeps.

    It needs those that a step sees. More are loaded ahead, while two programs find room on a multiprocessor.
    """
    room = (gpu.shared_memory_per_multiprocessor // 2 - 1024 - _beside_ring(band)) // (2 * 128)
    least, most = -(-(band - 16 + STEP) // BATCH), (band - 16 + 2 * STEP) // BATCH
    return max(least, min(room // BATCH, most)) * BATCH


def _beside_ring(band: int) -> int:
    """Bytes of what else lies there, as forward.cu says: notes, position keys, queries of every warp and, if
    there is room beside them, its distances."""
    distances = 1136 if band <= 144 else 0
    return 128 + band * 128 + STEP // 16 * (16 * 128 + distances)


def _forward_shared_memory(band: int, gpu: Any) -> int:
    return _beside_ring(band) + 2 * _ring(band, gpu) * 128


def _programs_at_a_time(band: int, gpu: Any) -> int:
    """Of the forward pass: two on a multiprocessor, if it has room for them."""
    each = _forward_shared_memory(band, gpu) + 1024
    return (2 if 2 * each <= gpu.shared_memory_per_multiprocessor else 1) * int(gpu.multi_processor_count)


def _shared_memories(band: int, gpu: Any) -> dict[str, int]:
    """Bytes of a program of every kernel."""
    return {
        "forward": _forward_shared_memory(band, gpu),
        "query_gradient": _query_shared_memory(band),
        "key_gradient": 2 * _rows(band),
        "sums": 0,
    }


def _threads(kernel: str) -> int:
    return 2 * (STEP if kernel == "forward" else TILE)


class _Kernel:
    def __init__(self, device: int, function: ctypes.c_void_p, threads: int, shared_memory: int) -> None:
        self.device, self.function = device, function
        self.threads, self.shared_memory = threads, shared_memory
        _check(_cuda().cuFuncSetAttribute(function, _SHARED_MEMORY, shared_memory))

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        cells = [_cell(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        _enter(self.device)
        blocks = (*grid, 1, 1)[:3]
        _check(
            _cuda().cuLaunchKernel(
                self.function, *blocks, self.threads, 1, 1, self.shared_memory, stream, places, None
            )
        )


def _cell(argument: Any) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else argument


def _kernels(q_BHTK: Tensor, longest_window: int, options: Options) -> dict[str, _Kernel] | None:
    device = torch.cuda.current_device() if q_BHTK.device.index is None else q_BHTK.device.index
    return _compiled(
        device, _band(longest_window), options.first_distance, options.dropout > 0, HALVES[q_BHTK.dtype]
    )


@cache
def _compiled(
    device: int, band: int, first_distance: int, drops: bool, half: str
) -> dict[str, _Kernel] | None:
    """None where there is no NVRTC, or none that can compile for this GPU."""
    if _compiler() is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    options = compiler_options(band, first_distance, drops, half)
    try:
        codes = [_machine_code(name, [f"--gpu-architecture=sm_{major}{minor}", *options]) for name in FILES]
    except RuntimeError as problem:
        warnings.warn(f"short windows are left to Triton, which takes longer: {problem}", stacklevel=2)
        return None
    gpu = torch.cuda.get_device_properties(device)
    sizes, kernels = _shared_memories(band, gpu), {}
    _enter(device)
    for code, names in zip(codes, FILES.values(), strict=True):
        module = ctypes.c_void_p()
        _check(_cuda().cuModuleLoadData(ctypes.byref(module), code))
        for name in names:
            function = ctypes.c_void_p()
            _check(_cuda().cuModuleGetFunction(ctypes.byref(function), module, f"short_{name}".encode()))
            kernels[name] = _Kernel(device, function, _threads(name), sizes[name])
    return kernels


def _enter(device: int) -> None:
    """A thread of autograd that has not used the GPU yet has no context there: it gets torch's."""
    context = ctypes.c_void_p()
    _check(_cuda().cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        _check(_cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(_cuda().cuCtxSetCurrent(context))


def compiler_options(band: int, first_distance: int, drops: bool, half: str) -> list[str]:
    named = {"NB": band, "FIRST": first_distance, "DROPS": int(drops), "HALF": f'"{half}"'}
    return ["--std=c++17", f"-DIS_{half.upper()}", *(f"-D{name}={value}" for name, value in named.items())]


def source(file: str, instructions: Path = _FOLDER / "instructions.cuh") -> str:
    """All that a file of kernels is compiled from."""
    return "".join(path.read_text() for path in (instructions, _FOLDER / "common.cuh", _FOLDER / file))


def _machine_code(file: str, options: list[str]) -> bytes:
    nvrtc, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc is not None, "asked for before"
    listed = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    text = source(file).encode()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, file.encode(), 0, None, None))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), listed):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"{file} does not compile:\n{log.value.decode()}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


@cache
def _compiler() -> ctypes.CDLL | None:
    """NVRTC as torch has it, if it is there."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


@cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA answers with error {code}")
