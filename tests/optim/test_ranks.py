"""The optimizers in several processes, with whole and with sharded parameters, against one process.

The processes of a world size are started once and run all checks, because it takes seconds to start them.
Everything is in float64, where rounding is far below the differences that a wrong formula makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from longspan import distributed
from longspan.config import StageConfig
from longspan.models.interface import LanguageModel
from longspan.optim import build_optimizers, memories, muon, restore_memories, set_rate
from longspan.state import State
from longspan.training.averaging import Average
from longspan.training.grad_scaler import GradScaler
from longspan.training.parallel import clip_norm
from tests import forks

STEPS = 4
SHAPES = {
    "tall": (5, 3),
    "tall_too": (5, 3),
    "tall_three": (5, 3),
    "square": (7, 7),
    "wide": (2, 9),
    "wide_too": (2, 9),
    "stacked": (3, 4, 6),
    "vector": (5,),
    "single": (1,),
    "whole": (5,),
    "scalar": (),
}
NEVER_SHARDED = ["whole", "scalar"]
MATRICES = [name for name, shape in SHAPES.items() if len(shape) > 1]

STAGES: dict[str, dict[str, Any]] = {
    "adagrad": {"optimizer": "adagrad", "clip_norm": 0.7},
    "lamb": {"optimizer": "lamb", "weight_decay": 0.1},
    "lamb without least trust": {"optimizer": "lamb", "min_trust": 0.0},
    "muon": {"optimizer": "muon", "weight_decay": 0.1},
    "normuon": {"optimizer": "normuon", "weight_decay": 0.1, "cautious_decay": True},
    "sgd": {"optimizer": "sgd"},
    "sgd with momentum": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "adamw clipped by norm": {"optimizer": "adamw", "clip_norm": 2.0},
    "sgd clipped by norm": {"optimizer": "sgd", "clip_norm": 2.0},
    "sgd clipped by value": {"optimizer": "sgd", "clip_value": 0.3},
}


class Bag(LanguageModel):
    """Parameters of many shapes; with a mesh they are sharded as FSDP2 does it."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.vocabulary_size = 2
        self.head = nn.Identity()  # no parameters
        values = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=values, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(placed(name, value, mesh)))

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"matrix": [getattr(self, name) for name in MATRICES]}

    def initial_state(self, batch_size: int) -> State:
        return State({})

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        raise NotImplementedError

    def values(self) -> dict[str, Tensor]:
        return {name: distributed.full(p.detach()).clone() for name, p in self.named_parameters()}


def placed(name: str, value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    if mesh is None or name in NEVER_SHARDED:
        return value
    rows = -(-len(value) // mesh.size())
    held = value[mesh.get_rank() * rows :][:rows]  # without communication, unlike `distribute_tensor`
    sizes = {"shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(held.clone(), mesh, [Shard(0)], run_check=False, **sizes)


def optimizers_of(model: Bag, settings: dict[str, Any]) -> list[Optimizer]:
    stage = StageConfig(**{"steps": STEPS, "learning_rate": 0.1, **settings})
    optimizers = build_optimizers(model, stage)
    set_rate(optimizers, 1.0)
    return optimizers


def step(
    model: Bag, optimizers: list[Optimizer], number: int, settings: dict[str, Any], mesh: DeviceMesh | None
) -> None:
    """Gradients that differ from step to step, on both sides of the clips."""
    noise = torch.Generator().manual_seed(100 + number)
    for i, (name, p) in enumerate(model.named_parameters()):
        gradient = torch.randn(p.shape, generator=noise, dtype=torch.float64) * 0.3 ** ((number + i) % 3)
        p.grad = placed(name, gradient, mesh)
    moving = list(model.parameters())
    if settings.get("clip_value"):
        for alike in distributed.by_placement(moving):
            torch.nn.utils.clip_grad_value_(alike, settings["clip_value"])
    if settings.get("clip_norm") and settings["optimizer"] != "adagrad":
        clip_norm(moving, settings["clip_norm"])
    for optimizer in optimizers:
        optimizer.step()


def trained(settings: dict[str, Any], mesh: DeviceMesh | None = None) -> tuple[Bag, list[Optimizer]]:
    model = Bag(mesh)
    optimizers = optimizers_of(model, settings)
    for number in range(STEPS):
        step(model, optimizers, number, settings, mesh)
    return model, optimizers


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            distributed.full(found[name]),
            value,
            rtol=1e-9,
            atol=1e-12,
            msg=lambda m, name=name: f"{name}: {m}",
        )


class Checks:
    """What a process checks. Everything of one process is computed before the processes are connected."""

    def __init__(self, connect: Callable[[], DeviceMesh]) -> None:
        alone = {name: trained(settings) for name, settings in STAGES.items()}
        self.weights = {name: model.values() for name, (model, _) in alone.items()}
        self.memories = {name: memories(*pair) for name, pair in alone.items()}
        self.average = self.averaged(None)
        self.mesh = connect()

    def by_name(self) -> dict[str, Callable[[], None]]:
        whole = {f"{name}, whole": partial(self.follows, name, None) for name in STAGES}
        sharded = {f"{name}, sharded": partial(self.follows, name, self.mesh) for name in STAGES}
        return {
            **whole,
            **sharded,
            "muon is divided, whole": partial(self.divided, None),
            "muon is divided, sharded": partial(self.divided, self.mesh),
            "restored states": self.restored,
            "an overflow on one rank": self.overflow,
            "averaged weights": lambda: compare(self.averaged(self.mesh), self.average),
        }

    def follows(self, name: str, mesh: DeviceMesh | None) -> None:
        model, optimizers = trained(STAGES[name], mesh)
        compare(model.values(), self.weights[name])
        states = memories(model, optimizers)
        compare(states, self.memories[name])
        parameters = dict(model.named_parameters())
        for state, value in states.items():
            parameter, _, key = state.rpartition(".")
            held = parameters[parameter]
            whole = key in ("step", "line_moment")
            assert isinstance(value, DTensor) is (not whole and isinstance(held, DTensor)), state
            if isinstance(value, DTensor):
                assert value.placements == held.placements
                assert value.to_local().shape == held.to_local().shape
        if mesh is None:  # the same bits on every rank
            own = torch.cat([p.detach().flatten() for p in model.parameters()])
            first = own.clone()
            dist.broadcast(first, src=0)
            assert torch.equal(own, first)

    def divided(self, mesh: DeviceMesh | None) -> None:
        """All matrices are orthogonalised once, and no rank has more than its share of a shape."""
        with counted_matrices() as counts:
            trained(STAGES["muon"], mesh)
        matrices = {SHAPES[name]: 0 for name in MATRICES}
        for name in MATRICES:
            matrices[SHAPES[name]] += SHAPES[name][0] if len(SHAPES[name]) == 3 else 1
        share = sum(-(-count // dist.get_world_size()) for count in matrices.values())
        assert sum(counts) <= STEPS * share
        total = distributed.summed(torch.tensor(sum(counts)))
        assert total == STEPS * sum(matrices.values()), f"{total} matrices"

    def restored(self) -> None:
        for mesh in (None, self.mesh):
            for settings in map(
                STAGES.__getitem__, ("adagrad", "lamb", "muon", "normuon", "sgd with momentum")
            ):
                model, optimizers = trained(settings, mesh)
                other = Bag(mesh)
                other.load_state_dict(model.state_dict())
                saved = {name: value.clone() for name, value in memories(model, optimizers).items()}
                its = optimizers_of(other, settings)
                restore_memories(other, its, saved)
                step(model, optimizers, STEPS, settings, mesh)
                step(other, its, STEPS, settings, mesh)
                for p, same in zip(model.parameters(), other.parameters(), strict=True):
                    assert torch.equal(distributed.local(p), distributed.local(same)), settings

    def overflow(self) -> None:
        """The scaler of fp16 skips the step on every rank."""
        for name in ("adamw", "adagrad", "muon", "normuon", "sgd"):
            for last_overflows in (False, True):
                model = Bag(self.mesh)
                optimizers = optimizers_of(model, STAGES[name])
                before = model.values()
                scaler = GradScaler("cpu")
                for key, p in model.named_parameters():
                    p.grad = placed(key, scaler.scale(torch.ones(p.shape, dtype=torch.float64)), self.mesh)
                if last_overflows and dist.get_rank() == 1:
                    for p in (model.square, model.vector):  # with Muon, each has an optimizer of its own
                        distributed.local(p.grad).fill_(torch.inf)
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                assert torch.equal(distributed.full(model.tall.grad), torch.ones(5, 3, dtype=torch.float64))
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
                moved = {key for key, value in model.values().items() if not torch.equal(value, before[key])}
                assert moved == (set() if last_overflows else SHAPES.keys())

    @staticmethod
    def averaged(mesh: DeviceMesh | None) -> dict[str, Tensor]:
        settings = STAGES["adamw"]
        model = Bag(mesh)
        optimizers = optimizers_of(model, settings)
        average = Average(model, 0.6)
        for number in range(STEPS):
            step(model, optimizers, number, settings, mesh)
            average.follow(number + 1)
        other = Average(model, 0.6)
        other.restore(average.weights)
        own = model.values()
        with other.in_place():
            inside = model.values()
        for name, value in model.values().items():
            assert torch.equal(value, own[name]), name
        return inside


@contextmanager
def counted_matrices() -> Iterator[list[int]]:
    """Inside, collects how many matrices each call of `orthogonal` has."""
    original, counts, inside = muon.orthogonal, [], False

    def counting(x_NRC: Tensor) -> Tensor:
        nonlocal inside
        if inside:  # it calls itself for tall matrices
            return original(x_NRC)
        counts.append(len(x_NRC))
        inside = True
        try:
            return original(x_NRC)
        finally:
            inside = False

    muon.orthogonal = counting
    try:
        yield counts
    finally:
        muon.orthogonal = original


def process(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)

    def connect() -> DeviceMesh:
        where = f"file://{folder}/store"
        patience = timedelta(seconds=60)
        dist.init_process_group("cpu:gloo", init_method=where, rank=rank, world_size=size, timeout=patience)
        return init_device_mesh("cpu", (size,))

    for name, check in Checks(connect).by_name().items():
        try:
            check()
        except Exception as problem:
            raise AssertionError(f"rank {rank} of {size}, {name}") from problem
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 4])
def test_processes_follow_one_process(size: int, tmp_path: Path) -> None:
    forks.spawn(process, (size, str(tmp_path)), size)
