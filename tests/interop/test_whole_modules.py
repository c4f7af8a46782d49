"""Checkpoints that are whole modules: they equal the same weights imported from a state dict."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longspan.cli import main
from longspan.config import ModelConfig, TransformerXLConfig
from longspan.errors import UserError
from longspan.interop.original import read_original
from tests.interop.checkpoints import Original
from tests.interop.whole_modules import save_whole

CASES = [
    "sha_rnn",
    "sha_rnn_split",
    "txl_basic",
    "txl_adaptive_div1",
    "txl_adaptive_div1_noproj",
    "txl_adaptive_div2",
    "txl_prenorm_untied",
    "txl_same_length_clamp",
]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "parallel"])
@pytest.mark.parametrize("case", CASES)
def test_a_module_is_read_without_options(tmp_path, case, wrapped, legacy):
    """Its attributes have what shapes do not tell, so nothing needs to be given."""
    made = Original.of(case)
    wanted, expected = read_original(made.save(tmp_path / "s.pt"), made.kind, made.options)
    config, model = read_original(
        save_whole(made, tmp_path / "m.pt", legacy=legacy, wrapped=wrapped), made.kind
    )
    assert "mem_transformer" not in sys.modules
    assert "splitcross" not in sys.modules
    assert comparable(config, made) == comparable(wanted, made)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert tensor.equal(model.state_dict()[name]), name


def comparable(config: ModelConfig, made: Original) -> ModelConfig:
    """Without what has no effect: which projections are tied, where there are none."""
    if not isinstance(config, TransformerXLConfig) or any("emb_projs" in name for name in made.tensors):
        return config
    return replace(config, vocabulary=replace(config.vocabulary, tied_projections="none"))


@pytest.mark.parametrize("case", ["sha_rnn", "txl_basic"])
def test_a_module_is_imported_and_scored_like_a_state_dict(tmp_path, capsys, case):
    made = Original.of(case)
    (tmp_path / "options.json").write_text(json.dumps(made.options))
    (tmp_path / "numbers.txt").write_text("3 1 4 15 9 2 6 5 35 8 9 7\n" * 60)
    whole = save_whole(made, tmp_path / "m.pt", legacy=True)
    options = ["--config", str(tmp_path / "options.json")]
    scores = []
    for run, file, more in (("a", whole, []), ("b", made.save(tmp_path / "s.pt"), options)):
        out = str(tmp_path / run)
        assert main(["import", str(file), "--kind", made.kind, "--out", out, *more]) == 0
        capsys.readouterr()
        words = ["--data", str(tmp_path / "numbers.txt"), "--protocol", "every-token", "--device", "cpu"]
        assert main(["eval", out, *words, "--block-length", "16", "--json"]) == 0
        scores.append(json.loads(capsys.readouterr().out)["loss"])
    assert scores[0] == scores[1] > 0


def test_half_precision_and_a_wrapped_state_dict(tmp_path):
    made = Original.of("txl_basic")
    exact = read_original(made.save(tmp_path / "s.pt"), made.kind, made.options)[1]
    halves = {f"module.{name}": tensor.half() for name, tensor in made.tensors.items()}
    torch.save(halves, tmp_path / "h.pt")
    found = read_original(tmp_path / "h.pt", made.kind, made.options)[1]
    for name, tensor in exact.state_dict().items():
        assert found.state_dict()[name].dtype == torch.float32
        assert tensor.half().float().equal(found.state_dict()[name])


def test_another_kind_of_attention_is_refused(tmp_path):
    made = Original.of("txl_basic")
    made.options["model"]["attn_type"] = 2
    message = refused(save_whole(made, tmp_path / "m.pt"), "transformer-xl")
    assert "attention of type 2 is not supported" in message


def test_a_module_of_another_project_names_what_is_missing(tmp_path):
    made = Original.of("sha_rnn")
    message = refused(save_whole(made, tmp_path / "m.pt"), "transformer-xl")
    assert "'word_emb.emb_layers.0.weight' is missing" in message


def refused(path: Path, kind: str) -> str:
    with pytest.raises(UserError) as caught:
        read_original(path, kind)
    assert "\n" not in str(caught.value)
    return str(caught.value)
