"""What earlier versions wrote is still read: old options in config.toml, old tensor names in checkpoints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import longspan
from longspan.config import AllAttentionConfig, ModernConfig, RunConfig, SpanConfig, schema
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.errors import UserError
from longspan.models import build
from longspan.runs import RunFolder, checkpoint
from longspan.runs.checkpoint import _checksum

SPAN = SpanConfig(limit=8, ramp=4)
MODELS = {
    "slots": AllAttentionConfig(num_layers=1, width=8, num_heads=2, num_persistent=3, span=SPAN),
    "query_key_norm": ModernConfig(
        num_layers=1, width=8, num_heads=2, inner_width=8, span=SPAN, rope_base=99.0
    ),
}
OLD_OPTIONS = {"num_persistent": "num_slots", "qk_norm": "query_key_norm", "rope_base": "rotary_base"}
OLD_TENSORS = {".persistent.": ".slots.", ".qk_norm.": ".query_key_norm."}


def with_old_names(run: RunFolder) -> None:
    """Write the folder as it was written before."""
    config = run.path / "config.toml"
    text = config.read_text()
    for new, old in OLD_OPTIONS.items():
        text = re.sub(rf"^{new} =", f"{old} =", text, flags=re.MULTILINE)
    config.write_text(text)
    path = run.checkpoint("best")
    tensors = load_file(path)
    for new, old in OLD_TENSORS.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    said = json.dumps({})
    save_file(tensors, path, metadata={"facts": said, "checksum": _checksum(tensors, said)})


@pytest.mark.parametrize("name", MODELS)
def test_a_run_of_before(name: str, tmp_path: Path) -> None:
    config = RunConfig(name="old", model=MODELS[name])
    model = build(config.model, 256).eval()
    run = RunFolder.create_with_weights(
        tmp_path / "run", config, ByteTokenizer(), "", model.state_dict(), facts={}
    )
    with_old_names(run)
    assert any(name in tensor for tensor in load_file(run.checkpoint("best")))
    with pytest.warns(FutureWarning, match="is now called"):
        loaded = longspan.load(run.path, device="cpu")
    assert loaded.config.model == config.model
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[key], tensor)


def test_facts_of_before() -> None:
    facts = checkpoint.current_facts(
        {
            "window": {"tokens": 3},
            "settled": {"training.passage_length": 64, "model.width": 8, "model.smear": False},
            "progress": {"step": 7, "position": {"blocks": 7, "offset": 64, "passes": 2}},
        }
    )
    assert facts == {
        "loss_meter": {"tokens": 3},
        "fixed_options": {"training.segment_length": 64, "model.width": 8},
        "progress": {"step": 7, "position": {"blocks": 7, "offset": 64, "epoch": 2}},
    }


@pytest.mark.parametrize("name", sorted(ModernConfig.REMOVED))
def test_a_removed_option_is_read_if_it_was_off(name: str) -> None:
    table = {"architecture": "modern", "width": 32, "num_heads": 2}
    read = schema.read(RunConfig, {"model": table | {name: False}})
    assert read == schema.read(RunConfig, {"model": table})
    with pytest.raises(UserError, match=f"'model.{name}' was removed .*: leave it out"):
        schema.read(RunConfig, {"model": table | {name: True}})


def test_the_tool_warns_in_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        "[training]\nrehearsal = 1\nbatch_size = 0\n[[stage]]\nsteps = 1\nlearning_rate = 0.1\n"
    )
    command = [sys.executable, "-m", "longspan", "train", str(recipe)]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    first, second = told.stderr.splitlines()
    assert (
        first
        == "longspan: warning: 'training.rehearsal' is now called 'training.compile_warmup': please rename it"
    )
    assert second.startswith("longspan: ")
    assert "batch_size" in second
