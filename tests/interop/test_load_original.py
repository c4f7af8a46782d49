"""Checkpoints of the originals, in both of torch's formats: the same outputs, and one line for a fault."""

from __future__ import annotations

import argparse
import json
import pickle
import re
from pathlib import Path

import pytest
import torch

from longspan.config import schema
from longspan.errors import UserError
from longspan.interop import load_original
from longspan.interop.original import read_original
from tests.interop.checkpoints import Original
from tests.models import golden, test_fairseq_golden, test_sha_rnn_golden, transformer_xl_golden
from tests.models.golden import close

ADAPTIVE_IO = ["adaptive_io_tied", "adaptive_io_untied", "wiki103_style"]
ONE_OF_EACH = [
    "wiki103_style",
    "adaptive_span_basic",
    "sha_rnn_split",
    "txl_adaptive_div2",
    "txl_adaptive_div1",
    "fairseq_adaptive_span",
    "fairseq_adaptive_span_layer",
]
HUGGING_FACE = ["hf_transfo_xl_tie_r", "hf_transfo_xl_untie_r"]


def complaint(path: Path, kind: str, config=None, **more) -> str:
    with pytest.raises(UserError) as caught:
        load_original(path, kind=kind, config=config, **more)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("case", golden.CASES + ADAPTIVE_IO)
@torch.no_grad()
def test_adaptive_span_computes_what_the_original_did(tmp_path, case, legacy):
    recorded, made = golden.Golden.load(case), Original.of(case)
    model = load_original(made.save(tmp_path / "c.pt", legacy=legacy), kind=made.kind, config=made.options)
    state = model.initial_state(recorded.tensors["data"].shape[0])
    for number, (x, y) in enumerate(recorded.blocks()):
        hidden, state = model(x, state)
        loss = model.head.nll(hidden, y).mean()
        close(loss, recorded.tensors[f"eval.loss.{number}"], recorded.rounding["eval"] + 1e-7, case)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("case", test_fairseq_golden.CASES)
@torch.no_grad()
def test_fairseq_computes_what_the_original_did(tmp_path, case, legacy):
    """Its options lie in the file."""
    recorded, made = test_fairseq_golden.load(case), Original.of(case)
    model = load_original(made.save(tmp_path / "c.pt", legacy=legacy), kind=made.kind)
    log_probs, _ = model.log_probs(recorded.blocks()[0], model.initial_state(2))
    close(log_probs, recorded.tensors["eval.logprob.0"], recorded.rounding["eval"], case)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("case", ["sha_rnn", "sha_rnn_split"])
@torch.no_grad()
def test_sha_rnn_computes_what_the_original_did(tmp_path, case, legacy):
    recorded, made = test_sha_rnn_golden.load(case), Original.of(case)
    model = load_original(made.save(tmp_path / "c.pt", legacy=legacy), kind=made.kind, config=made.options)
    state = model.initial_state(2)
    for number, (x, _) in enumerate(recorded.blocks()):
        hidden, state = model(x, state)
        expected = recorded.tensors[f"eval.h.{number}"].transpose(0, 1)
        close(hidden, expected, recorded.rounding["eval"], case)


@pytest.mark.parametrize("told", [True, False])
@torch.no_grad()
def test_sha_rnn_may_predict_with_weights_of_its_own(tmp_path, told):
    made, x = Original.of("sha_rnn"), torch.arange(12)[None]
    weight, bias = torch.randn(made.tensors["decoder.weight"].shape), made.tensors["decoder.bias"]
    made.tensors["decoder.weight"] = weight
    options = {**made.options["model"], "tie_weights": False}
    if not told:
        del options["tie_weights"]
    model = load_original(made.save(tmp_path / "c.pt"), kind=made.kind, config=options)
    tied = load_original(Original.of("sha_rnn").save(tmp_path / "t.pt"), kind=made.kind, config=made.options)
    hidden, _ = tied(x, tied.initial_state(1))
    log_probs, _ = model.log_probs(x, model.initial_state(1))
    torch.testing.assert_close(log_probs, (hidden @ weight.T + bias).log_softmax(-1))
    made.options["model"]["tie_weights"] = True
    message = complaint(made.save(tmp_path / "c.pt"), made.kind, made.options)
    assert "'decoder.weight' should be the same as 'encoder.weight'" in message


@pytest.mark.parametrize("group", ["evalA", "evalB"])
@pytest.mark.parametrize("case", transformer_xl_golden.CASES)
@torch.no_grad()
def test_transformer_xl_computes_what_the_original_did(tmp_path, case, group):
    """evalB: with the lengths of another evaluation, which are overridden."""
    recorded, made = transformer_xl_golden.Golden.load(case), Original.of(case)
    path, overrides = made.save(tmp_path / "c.pt", legacy=group == "evalB"), None
    if group == "evalB":
        names = {"mem_len": "memory_length", "clamp_len": "clamp_length", "same_length": "same_length"}
        overrides = {ours: recorded.facts["eval_settings"][theirs] for theirs, ours in names.items()}
    model = load_original(path, kind=made.kind, config=made.options, overrides=overrides)
    blocks = recorded.blocks(group)
    state = model.initial_state(blocks[0][0].shape[0])
    name = "nll_next_token" if recorded.hugging_face else "nll"
    for number, (x, y) in enumerate(blocks):
        hidden, state = model(x, state)
        nll = model.head.nll(hidden[:, -y.shape[1] :], y)
        close(nll, recorded.batch_first(f"{group}.{name}.{number}"), recorded.rounding[group], case)


@pytest.mark.parametrize("case", [*golden.CASES, *ADAPTIVE_IO, "sha_rnn", "sha_rnn_split"])
def test_shapes_and_weights_tell_all_but_a_few_options(tmp_path, case):
    made = Original.of(case)
    path = made.save(tmp_path / "c.pt")
    untold = {"adapt_span_ramp", "adapt_span_loss", "adapt_span_cache", "num_max_positions", "splits"}
    groups = [part for part in made.options.values() if isinstance(part, dict)]
    few = {name: value for part in groups for name, value in part.items() if name in untold}
    assert read_original(path, made.kind, few)[0] == read_original(path, made.kind, made.options)[0]


@pytest.mark.parametrize("case", transformer_xl_golden.CASES)
def test_shapes_and_weights_tell_how_a_transformer_xl_is_tied(tmp_path, case):
    made = Original.of(case)
    path = made.save(tmp_path / "c.pt")
    untold = ("mem_len", "clamp_len", "same_length", "pre_lnorm", "cutoffs")
    few = {name: made.options["model"][name] for name in untold}
    found, wanted = (read_original(path, made.kind, options)[0] for options in (few, made.options["model"]))
    assert found.vocabulary.tied == wanted.vocabulary.tied
    projections = [name for name in made.tensors if "emb_projs" in name]
    if projections and wanted.vocabulary.cutoffs:
        assert found.vocabulary.tied_projections == wanted.vocabulary.tied_projections
    assert found.num_heads == wanted.num_heads
    assert found.biases == wanted.biases


def test_projections_that_a_short_list_leaves_out_are_not_tied(tmp_path):
    made = Original.of("txl_adaptive_div2")
    for number in (1, 2):
        made.tensors[f"crit.out_projs.{number}"] = torch.randn(made.tensors[f"crit.out_projs.{number}"].shape)
    made.options["model"] |= {"tie_projs": [False]}  # the default of the original's constructor
    model = load_original(made.save(tmp_path / "c.pt"), kind=made.kind, config=made.options)
    assert model.get_parameter("head.projections.2").equal(made.tensors["crit.out_projs.2"])


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("case", ["txl_adaptive_div2", "txl_adaptive_div1"])
@torch.no_grad()
def test_any_projections_may_be_tied(tmp_path, case, told):
    """The same model as one that holds the tied projections a second time."""
    made, x = Original.of(case), torch.arange(12)[None]
    made.options["model"]["tie_projs"] = ties = [False, True, False]
    for number in (0, 2):
        name = f"crit.out_projs.{number}"
        made.tensors[name] = torch.randn(made.tensors[name].shape)
    path = made.save(tmp_path / "c.pt")
    options = {**made.options["model"]}
    if not told:
        del options["tie_projs"]
    config, model = read_original(path, made.kind, options)
    assert config.vocabulary.tied_projections == tuple(ties)
    own = [name for name, _ in model.named_parameters() if name.startswith("head.projections")]
    assert own == ["head.projections.0", "head.projections.2"]
    untied = load_original(path, kind=made.kind, config={**options, "tie_projs": [False] * 3})
    found, expected = (m.log_probs(x, m.initial_state(1))[0] for m in (model, untied))
    assert found.equal(expected)
    assert schema.read(type(config), schema.write(config)) == config


def test_a_projection_tells_of_a_division_that_no_cluster_shows(tmp_path):
    made = Original.of("txl_basic")
    made.tensors["word_emb.emb_projs.0"], made.tensors["crit.out_projs.0"] = torch.randn(2, 32, 32)
    path = made.save(tmp_path / "c.pt")
    found, expected = (load_original(path, kind=made.kind, config=o) for o in ({}, {"div_val": 4}))
    x = torch.arange(9)[None]
    assert found(x, found.initial_state(1))[0].equal(expected(x, expected.initial_state(1))[0])


@pytest.mark.parametrize("case", test_fairseq_golden.CASES)
def test_options_of_fairseq_are_given_or_lie_in_the_file_or_follow_from_shapes(tmp_path, case):
    made = Original.of(case)
    path, options = made.save(tmp_path / "c.pt"), made.options["model"]
    told, _ = read_original(path, made.kind)
    assert told == read_original(path, made.kind, made.options)[0]
    assert (told.span.ramp, told.span.penalty, told.span.renormalise) == (16, 0.002, False)
    assert read_original(path, made.kind, {"adapt_span_ramp": 8})[0].span.ramp == 8
    made.options = {}
    untold = {name: options[name] for name in ("adapt_span_ramp", "aux_loss_scaler")}
    assert read_original(made.save(path), made.kind, untold)[0] == told
    made.options = {"model": {**options, "vocab_size": 50, "d_inner": None}}  # as fairseq itself stores it
    assert read_original(made.save(path), made.kind)[0] == told
    assert load_original(path, kind=made.kind).vocabulary_size == 60


@pytest.mark.parametrize("place", ["cfg", "args"])
def test_options_of_fairseq_may_be_an_object(tmp_path, place):
    """Where fairseq saved what argparse gave it."""
    made, path = Original.of("fairseq_adaptive_span"), tmp_path / "c.pt"
    wanted = read_original(made.save(path), made.kind)[0]
    model = {f"decoder.model.{name}": tensor for name, tensor in made.tensors.items()}
    options = argparse.Namespace(**made.options["model"])
    torch.save({place: {"model": options} if place == "cfg" else options, "model": model}, path)
    assert read_original(path, made.kind)[0] == wanted


@pytest.mark.parametrize("case", HUGGING_FACE)
def test_the_configuration_that_lies_beside_hugging_faces_weights_is_read(tmp_path, case):
    made = Original.of(case)
    path = made.save(tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(made.options["model"]))
    found = read_original(path, made.kind)[0]
    assert found == read_original(path, made.kind, made.options)[0]
    assert found.memory_length == made.options["model"]["mem_len"]
    assert read_original(path, made.kind, {"mem_len": 7, "cutoffs": [40, 100]})[0].memory_length == 7


def test_fairseq_keeps_hugging_faces_model_under_longer_names(tmp_path):
    made = Original.of("hf_transfo_xl_untie_r")
    longer = {f"decoder.model.{name}": tensor for name, tensor in made.tensors.items()}
    torch.save({"model": longer, "args": None}, tmp_path / "f.pt")
    paths = (tmp_path / "f.pt", made.save(tmp_path / "h.pt"))
    found, expected = (load_original(path, kind=made.kind, config=made.options) for path in paths)
    for name, tensor in expected.state_dict().items():
        assert tensor.equal(found.state_dict()[name])


def test_what_nothing_tells_has_the_originals_default(tmp_path):
    span, _ = read_original(Original.of("adaptive_span_basic").save(tmp_path / "s.pt"), "adaptive-span")
    assert (span.span.ramp, span.span.memory, span.span.penalty) == (32, "full", 0.0)
    fairseq = Original.of("fairseq_adaptive_span")
    fairseq.options = {}
    span, _ = read_original(fairseq.save(tmp_path / "f.pt"), "fairseq-adaptive-span")
    assert (span.span.ramp, span.span.memory, span.span.penalty) == (32, "adaptive", 2e-6)
    sha, _ = read_original(Original.of("sha_rnn").save(tmp_path / "r.pt"), "sha-rnn")
    assert sha.memory_length == 5000
    xl, _ = read_original(Original.of("txl_basic").save(tmp_path / "x.pt"), "transformer-xl")
    assert (xl.memory_length, xl.clamp_length, xl.same_length) == (0, None, False)
    hf, _ = read_original(Original.of("hf_transfo_xl_untie_r").save(tmp_path / "h.pt"), "hf-transfo-xl")
    assert (hf.memory_length, hf.clamp_length, hf.same_length) == (1600, 1000, True)


@pytest.mark.parametrize("case", ONE_OF_EACH + HUGGING_FACE)
def test_every_tensor_that_is_missing_is_named(tmp_path, case):
    made = Original.of(case)
    pointers = [tensor.data_ptr() for tensor in made.tensors.values()]
    for name, tensor in list(made.tensors.items()):
        if pointers.count(tensor.data_ptr()) > 1 or _is_unused(name):
            continue
        del made.tensors[name]
        message = complaint(made.save(tmp_path / "c.pt"), made.kind, made.options)
        assert f"'{name.removeprefix('transformer.')}' is missing" in message
        made.tensors[name] = tensor


@pytest.mark.parametrize("case", ONE_OF_EACH + HUGGING_FACE)
def test_every_tensor_that_does_not_fit_is_named(tmp_path, case):
    made = Original.of(case)
    for name, tensor in list(made.tensors.items()):
        if _is_unused(name):
            continue
        made.tensors[name] = torch.cat([tensor, tensor[:1]])
        message = complaint(made.save(tmp_path / "c.pt"), made.kind, made.options)
        assert f"'{name.removeprefix('transformer.')}'" in message
        made.tensors[name] = tensor


def _is_unused(name: str) -> bool:
    return re.search(r"mask_template|lnout|inv_freq", name) is not None


@pytest.mark.parametrize("case", ONE_OF_EACH + HUGGING_FACE)
def test_a_tensor_too_many_is_named(tmp_path, case):
    made = Original.of(case)
    made.tensors["layers.0.extra.weight"] = torch.zeros(3)
    message = complaint(made.save(tmp_path / "c.pt"), made.kind, made.options)
    assert "unexpected tensor 'layers.0.extra.weight'" in message


@pytest.mark.parametrize(
    ("case", "kind", "tensor"),
    [
        ("txl_basic", "adaptive-span", "key_pe"),
        ("adaptive_span_basic", "transformer-xl", "word_emb.emb_layers.0.weight"),
        ("sha_rnn", "hf-transfo-xl", "transformer.word_emb.emb_layers.0.weight"),
        ("txl_basic", "hf-transfo-xl", "transformer.word_emb.emb_layers.0.weight"),
        ("hf_transfo_xl_untie_r", "transformer-xl", "'word_emb.emb_layers.0.weight"),
        ("fixed_span", "sha-rnn", "blocks.0.lnstart.weight"),
        ("adaptive_span_basic", "fairseq-adaptive-span", "begins with 'decoder.model.'"),
        ("fairseq_adaptive_span", "adaptive-span", "key_pe"),
    ],
)
def test_a_wrong_kind_names_a_tensor_that_its_checkpoints_have(tmp_path, case, kind, tensor):
    assert tensor in complaint(Original.of(case).save(tmp_path / "c.pt"), kind)


def test_tied_tensors_that_differ_are_refused(tmp_path):
    made = Original.of("adaptive_io_tied")
    made.tensors["out_emb.out_projs.1"] = made.tensors["out_emb.out_projs.1"] + 1
    message = complaint(made.save(tmp_path / "c.pt"), made.kind, made.options)
    assert "'out_emb.out_projs.1' should be the same as 'in_emb.emb_projs.1'" in message


class Trap:
    """What pickle would call `Path.touch` for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_file_that_would_run_code_is_refused_and_does_not(tmp_path, legacy):
    path, mark = tmp_path / "c.pt", tmp_path / "ran"
    torch.save({"model": Trap(mark)}, path, _use_new_zipfile_serialization=not legacy)
    assert "could run code" in complaint(path, "adaptive-span")
    assert not mark.exists()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_an_error_of_one_line(tmp_path, legacy, share):
    path = Original.of("fixed_span").save(tmp_path / "c.pt", legacy=legacy)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert str(path) in complaint(path, "adaptive-span")


def test_what_is_no_checkpoint(tmp_path):
    path = tmp_path / "c.pt"
    assert f"there is no file {path}" in complaint(path, "adaptive-span")
    assert "is a folder" in complaint(tmp_path, "adaptive-span")
    path.write_text("words, no tensors")
    assert str(path) in complaint(path, "adaptive-span")
    torch.save([torch.zeros(2)], path)
    assert "has no named tensors" in complaint(path, "adaptive-span")
    torch.save({"model": 3, 4: torch.zeros(2)}, path)
    assert "'key_pe' is missing" in complaint(path, "adaptive-span")
    assert "did you mean 'sha-rnn'" in complaint(path, "sha-rnm")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.filterwarnings("error")
def test_a_plain_pickle_that_would_run_code_is_refused_without_a_word_more(tmp_path, protocol):
    path, mark = tmp_path / "c.pt", tmp_path / "ran"
    path.write_bytes(pickle.dumps({"model": Trap(mark)}, protocol=protocol))
    assert "could run code" in complaint(path, "transformer-xl")
    assert not mark.exists()


def test_options_that_are_none(tmp_path):
    made = Original.of("fixed_span")
    path, config = made.save(tmp_path / "c.pt"), tmp_path / "config.json"
    assert "there is no file" in complaint(path, made.kind, config)
    config.write_text("{")
    assert "is not JSON" in complaint(path, made.kind, config)
    config.write_text("[]")
    assert "JSON object" in complaint(path, made.kind, config)
    assert "'model_params' in a configuration" in complaint(path, made.kind, {"model_params": 3})
    config.write_text(json.dumps(made.options))
    assert load_original(path, kind=made.kind, config=config).vocabulary_size == 60


@pytest.mark.parametrize(
    ("case", "name", "wrong", "must_be"),
    [
        ("fixed_span", "nb_layers", "two", "a whole number"),
        ("fixed_span", "adapt_span_enabled", 0, "true or false"),
        ("wiki103_style", "adapt_io_cutoffs", 20, "a list"),
        ("fairseq_adaptive_span", "aux_loss_scaler", "2e-6", "a number"),
        ("fairseq_adaptive_span", "adapt_span_layer", "false", "true or false"),
        ("sha_rnn", "num_max_positions", 48.5, "a whole number"),
        ("txl_basic", "pre_lnorm", "false", "true or false"),
        ("txl_basic", "mem_len", 2.5, "a whole number"),
        ("hf_transfo_xl_tie_r", "clamp_len", "10", "a whole number"),
        ("txl_adaptive_div2", "tie_projs", True, "a list"),
    ],
)
def test_options_of_a_wrong_type_are_named(tmp_path, case, name, wrong, must_be):
    made = Original.of(case)
    message = complaint(made.save(tmp_path / "c.pt"), made.kind, {name: wrong})
    assert f"'{name}' must be {must_be}, not" in message


def test_a_configuration_that_is_no_file_of_json(tmp_path):
    path = Original.of("txl_basic").save(tmp_path / "c.pt")
    config = tmp_path / "config.json"
    assert complaint(path, "transformer-xl", config) == f"there is no file {config}"
    assert complaint(path, "transformer-xl", tmp_path).startswith(f"{tmp_path} cannot be read: ")
    config.write_text("{")
    assert complaint(path, "transformer-xl", config).startswith(f"{config} is not JSON: ")


def test_options_that_have_no_part_in_the_model_may_be_anything(tmp_path):
    made = Original.of("txl_basic")
    path = made.save(tmp_path / "c.pt")
    more = {"work_dir": "LM-TFM", "cuda": "yes", "lr": [1], "memlen": 5}
    found, expected = (read_original(path, made.kind, {**made.options, **m})[0] for m in (more, {}))
    assert found == expected


def test_tensors_of_adaptive_span_are_not_taken_for_fairseqs(tmp_path):
    torch.save(Original.of("adaptive_span_basic").tensors, tmp_path / "c.pt")
    assert "try the kind 'adaptive-span'" in complaint(tmp_path / "c.pt", "fairseq-adaptive-span")
    assert load_original(tmp_path / "c.pt", kind="adaptive-span").vocabulary_size == 60


def test_overrides_that_a_kind_does_not_have(tmp_path):
    made = Original.of("fixed_span")
    path = made.save(tmp_path / "c.pt")
    message = complaint(path, made.kind, overrides={"memory_length": 3})
    assert "'memory_length' cannot be overridden" in message
    made = Original.of("txl_basic")
    path = made.save(tmp_path / "x.pt")
    message = complaint(path, made.kind, overrides={"memory_length": 0, "same_length": True})
    assert "same_length needs a memory_length" in message
    assert "did you mean 'memory_length'?" in complaint(path, made.kind, overrides={"memlen": 5})


@pytest.mark.parametrize("name", ["memory_length", "clamp_length", "same_length"])
def test_overrides_of_a_wrong_type(tmp_path, name):
    made = Original.of("txl_basic")
    path = made.save(tmp_path / "x.pt")
    assert f"'overrides.{name}' must be" in complaint(path, made.kind, made.options, overrides={name: "3"})


@pytest.mark.parametrize("off", [-1, 0, None])
def test_nothing_is_clamped_by_a_length_that_is_not_above_zero(tmp_path, off):
    """As in the originals' own options."""
    made = Original.of("txl_same_length_clamp")
    path = made.save(tmp_path / "x.pt")
    options = {**made.options["model"], "clamp_len": -1}
    expected = load_original(path, kind=made.kind, config=options)
    found = load_original(path, kind=made.kind, config=made.options, overrides={"clamp_length": off})
    x = torch.arange(40)[None]
    assert found(x, found.initial_state(1))[0].equal(expected(x, expected.initial_state(1))[0])
