"""x-transformers as an entrant of a race. Needs `pip install x-transformers`.

Twelve layers of width 512 with RoPE, gated feed-forward, RMSNorm and flash attention. A step reads 32,768
bytes from random positions. Optimizer, learning rate and schedule are those of recipe gpt. Shapes: B windows,
T context.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import race_protocol
from longspan.config import StageConfig
from longspan.data import TokenizedCorpus
from longspan.errors import UserError
from longspan.optim import done, fraction

PREFIX = "x-transformers-"
TOKENS_A_STEP = 32_768
WARM_UPS = 5
WAIT_EVERY = 20  # steps between synchronisations with the device, so that the time is accurate
SIZE = {"dim": 512, "depth": 12, "heads": 8}
RATE = {"learning_rate": 1e-3, "warmup_steps": 200, "schedule": "cosine", "final_fraction": 0.1}


def context_of(name: str) -> int:
    """The context length in the name of an entrant."""
    context = name.removeprefix(PREFIX)
    if not context.isdecimal() or int(context) < 2:
        raise UserError(f"'{name}' needs a context, as in {PREFIX}1024")
    if importlib.util.find_spec("x_transformers") is None:
        raise UserError(f"{name} needs x-transformers: pip install x-transformers")
    return int(context)


def build(context: int, **size: int) -> torch.nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        **size, ff_mult=3, rotary_pos_emb=True, ff_glu=True, attn_flash=True, use_rmsnorm=True
    )  # 3 instead of 4, because a gated layer has three matrices
    return TransformerWrapper(num_tokens=256, max_seq_len=context, attn_layers=layers)


def run(
    context: int,
    corpus: TokenizedCorpus,
    *,
    seconds: float,
    seed: int,
    device: torch.device,
    peak: Callable[[], int | None] = lambda: None,
    **size: int,
) -> dict[str, Any]:
    """Train for this many seconds, score, and return the results."""
    torch.manual_seed(seed)
    model = build(context, **(SIZE | size)).to(device)
    spent, steps, tokens = _train(model, context, corpus.splits["train"].tokens, seconds, seed, device)
    peak_memory_bytes = peak()
    test = corpus.splits["test"].tokens
    nats = race_protocol.nats(
        _reader(model.eval()),
        corpus.splits["valid"].tokens,
        test,
        race_protocol.windows(len(test), context),
        batch_size=max(1, TOKENS_A_STEP // context),
        block_length=context,
        device=device,
    )
    return {
        "name": f"{PREFIX}{context}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": spent,
        "steps": steps,
        "tokens": tokens,
        "peak_memory_bytes": peak_memory_bytes,
        "nats": nats,
        "look_back": context,
        "scored_in": "windows",
    }


def _train(
    model: torch.nn.Module, context: int, text: np.ndarray, seconds: float, seed: int, device: torch.device
) -> tuple[float, int, int]:
    """Seconds spent, steps, and tokens seen."""
    stage = StageConfig(steps=10**9, max_seconds=seconds, **RATE)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=stage.learning_rate, betas=(0.9, 0.95), fused=True)
    read = torch.compile(model) if device.type == "cuda" else model
    draw = np.random.default_rng(seed)
    batch = max(1, TOKENS_A_STEP // context)

    def gradients() -> None:
        tokens = _windows(text, batch, context, draw, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = read(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()

    for _ in range(WARM_UPS):  # without updates
        gradients()
        optimizer.zero_grad()
    _wait(device)
    began, spent, step = time.perf_counter(), 0.0, 0
    while done(stage, step, spent) < 1:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * fraction(stage, step, spent)
        gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % WAIT_EVERY == 0:
            _wait(device)
        spent = time.perf_counter() - began
    _wait(device)
    return time.perf_counter() - began, step, step * batch * context


def _windows(
    text: np.ndarray, batch: int, context: int, draw: np.random.Generator, device: torch.device
) -> Tensor:
    starts = draw.integers(len(text) - context, size=batch)
    tokens_BT = torch.from_numpy(np.stack([text[s : s + context + 1] for s in starts]).astype(np.int64))
    return tokens_BT.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens_BT


def _reader(model: torch.nn.Module) -> race_protocol.Read:
    def read(tokens_BT: Tensor, targets_BT: Tensor, _: Any) -> tuple[Tensor, Any]:
        return F.cross_entropy(model(tokens_BT).mT.float(), targets_BT, reduction="none"), None

    return read


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
