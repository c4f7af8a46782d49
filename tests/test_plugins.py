"""Plugins: models, blocks, tokenizers and corpora of users' own, and every mistake one can make with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import longspan
from longspan import registry
from longspan.cli import main
from longspan.config import RunConfig, schema
from longspan.config.reference import documented
from longspan.errors import UserError
from longspan.runs import RunFolder

from .search.searches import search_table
from .training.runs import metrics, outcome, small_table, write_text

pytestmark = pytest.mark.usefixtures("own_registry")

LSTM = """
from dataclasses import dataclass

from torch import nn

import longspan
from longspan.output import SoftmaxHead


@dataclass(frozen=True, kw_only=True)
class LstmConfig:
    width: int = longspan.option(16, help="size of everything")
    dropout: float = longspan.option(0.0, help="dropout on the embeddings")
    layers_of_lstm: int = longspan.option(1, help="one above the other")

    def __post_init__(self):
        if self.width < 1:
            raise ValueError("width must be at least 1")


class LstmModel(longspan.LanguageModel):
    def __init__(self, config, vocabulary_size):
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.embedding = nn.Embedding(vocabulary_size, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(config.width, config.width, batch_first=True)
        self.head = SoftmaxHead(config.width, vocabulary_size)

    def initial_state(self, batch_size):
        zeros = self.embedding.weight.new_zeros(batch_size, self.lstm.hidden_size)
        return longspan.State({"h": zeros, "c": zeros.clone()})

    def forward(self, tokens_BT, state):
        before = (state.tensor("h")[None], state.tensor("c")[None])
        hidden_BTD, (h, c) = self.lstm(self.drop(self.embedding(tokens_BT)), before)
        return hidden_BTD, longspan.State({"h": h[0], "c": c[0]})


longspan.register_architecture("lstm", LstmConfig, LstmModel)
"""

BLOCKS = '''
from dataclasses import dataclass

import torch
from torch import nn

import longspan


@dataclass(frozen=True, kw_only=True)
class LowRankConfig:
    rank: int = longspan.option(help="of the product of two matrices")
    scale: float = longspan.option(1.0, help="of what is added")


class LowRank(longspan.Block):
    def __init__(self, width, options):
        super().__init__()
        self.down = nn.Linear(width, options.rank, bias=False)
        self.up = nn.Linear(options.rank, width, bias=False)
        self.scale = options.scale
        nn.init.constant_(self.up.weight, 0.25)

    def forward(self, h_BTD, state):
        return h_BTD + self.scale * self.up(self.down(h_BTD).tanh()), state


class Count(longspan.Block):
    """Adds how many tokens were read, which only a state can tell."""

    def initial_state(self, batch_size):
        return longspan.State({"read": torch.zeros(batch_size)})

    def forward(self, h_BTD, state):
        read_BT = state.tensor("read")[:, None] + torch.arange(1, h_BTD.shape[1] + 1)
        return h_BTD + 1e-3 * read_BT[..., None], longspan.State({"read": read_BT[:, -1]})


longspan.register_block("r", "low rank", lambda model, options: LowRank(model.width, options), LowRankConfig)
longspan.register_block("c", "count", lambda model, options: Count())
'''

DATA = """
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import longspan
from longspan.config import TokenizerConfig
from longspan.data import Corpus, Tokenizer

PLACE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class PairConfig(TokenizerConfig):
    fill: str = longspan.option(" ", help="what completes the last pair")

    def __post_init__(self):
        if len(self.fill) != 1:
            raise ValueError("fill must be one character")


class PairTokenizer(Tokenizer):
    form = kind = "pairs"

    def __init__(self, pairs, fill):
        self.pairs, self.fill = pairs, fill
        self.ids = {pair: number for number, pair in enumerate(pairs)}

    @staticmethod
    def fit(config, corpus):
        texts = [b"".join(corpus.read(split)).decode() for split in corpus.splits]
        return PairTokenizer(sorted({pair for text in texts for pair in cut(text, config.fill)}), config.fill)

    @property
    def vocabulary_size(self):
        return len(self.pairs)

    def encode(self, text):
        return np.array([self.ids.get(pair, 0) for pair in cut(text, self.fill)])

    def encode_split(self, chunks):
        yield self.encode(b"".join(chunks).decode())

    def pieces(self):
        return [pair.encode() for pair in self.pairs]

    def settings(self):
        return {"pairs": self.pairs, "fill": self.fill}

    @classmethod
    def from_settings(cls, settings, folder):
        return cls(settings["pairs"], settings["fill"])


def cut(text, fill):
    text += fill * (len(text) % 2)
    return [text[i : i + 2] for i in range(0, len(text), 2)]


def verses(say):
    say("verses are here")
    return PLACE / "verses.txt"


longspan.register_tokenizer("pairs", PairTokenizer, config_class=PairConfig)
longspan.register_corpus("verses", verses, about="the cat, again and again")
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the Python path, with three plugins; the user stands in another one."""
    folder = tmp_path / "code"
    folder.mkdir()
    for name, source in {"my_lstm": LSTM, "my_blocks": BLOCKS, "my_data": DATA}.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    return folder


def recipe(table: dict[str, Any], **changes: Any) -> str:
    """A recipe file in the folder where the user stands."""
    for name, value in changes.items():
        schema.override(
            table, name.replace("__", "."), value if isinstance(value, str) else json.dumps(value)
        )
    Path("mine.toml").write_text(tomli_w.dumps(json.loads(json.dumps(table))))
    return "mine.toml"


def lstm_recipe(**changes: Any) -> str:
    table = small_table(Path("text.txt"))
    table["model"] = {"architecture": "lstm", "width": 12}
    return recipe(table | {"plugins": ["my_lstm"]} | changes)


def complaint(capsys: pytest.CaptureFixture[str], *words: str, status: int = 1) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert main(list(words)) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("longspan: ")
    return lines[0].removeprefix("longspan: ")


def unload(*modules: str) -> None:
    """As in a new process."""
    for name in modules:
        del sys.modules[name]
    for table in (registry.ARCHITECTURES, registry.BLOCKS, registry.TOKENIZERS, registry.CORPORA):
        table.forget_failed(
            [name for name, entry in table.known().items() if isinstance(entry.made_by, str | None)]
        )


class TestArchitecture:
    """A model that is no stack of blocks."""

    def test_everything_works_without_naming_the_plugin_again(
        self, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stages = ["--stage.0.steps", "12", "--stage.1.steps", "9"]
        assert main(["train", lstm_recipe(), *stages, "--model.dropout", "0.1", "--out", "whole"]) == 0
        first = ["--stage.0.steps", "12", "--stage.1.steps", "2"]  # the run is made longer later
        assert main(["train", "mine.toml", *first, "--model.dropout", "0.1", "--out", "run"]) == 0
        config = Path("run/config.toml")
        config.write_text(config.read_text().replace("steps = 2\n", "steps = 9\n"))
        unload("my_lstm")
        assert main(["train", "--resume", "run"]) == 0
        assert RunFolder(Path("run")).config.plugins == ("my_lstm",)
        for which in ("last", "best"):
            assert outcome(Path("run"))[which][1] == outcome(Path("whole"))[which][1]

        capsys.readouterr()
        unload("my_lstm")
        assert main(["eval", "run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["loss"] < 5.4  # ln(256) = 5.55
        unload("my_lstm")
        assert main(["generate", "run", "--prompt", "the", "--tokens", "5", "--seed", "3"]) == 0
        written = capsys.readouterr().out
        unload("my_lstm")
        assert main(["bench", "run/config.toml", "--steps", "1", "--decode"]) == 0
        assert "decodes" in capsys.readouterr().out
        unload("my_lstm")
        lm = longspan.load("run", device="cpu")
        assert type(lm.model).__name__ == "LstmModel"
        assert written.rstrip("\n") == f"the{lm.generate('the', tokens=5, seed=3)}".rstrip("\n")

    def test_tied_weights_are_trained_saved_and_resumed(self, code: Path) -> None:
        """As usual in PyTorch: two modules have one parameter."""
        head = "self.head = SoftmaxHead(config.width, vocabulary_size)"
        tied = LSTM.replace(head, f"{head}\n        self.head.scores.weight = self.embedding.weight")
        assert tied != LSTM
        (code / "my_lstm.py").write_text(tied)
        whole = longspan.train(lstm_recipe(), out="whole")
        run = longspan.train("mine.toml", out="run", callback=lambda line: line["step"] < 14)
        assert run.final is None
        longspan.resume(run)
        assert outcome(Path("run"))["last"][1] == outcome(Path("whole"))["last"][1]
        model = whole.load().model
        assert model.head.scores.weight is model.embedding.weight  # type: ignore[union-attr]
        assert longspan.evaluate(whole, split="valid").loss < 5.4  # ln(256) = 5.55

    def test_options_are_checked_documented_and_settled(
        self, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lstm_recipe()
        said = complaint(capsys, "train", "mine.toml", "--model.widht", "3", status=2)
        assert said == "unknown key 'model.widht'; did you mean 'width'?"
        said = complaint(capsys, "train", "mine.toml", "--model.width", "wide", status=2)
        assert said == "'model.width' must be a whole number, not 'wide'"
        said = complaint(capsys, "train", "mine.toml", "--model.width", "0", status=2)
        assert said == "model: width must be at least 1"
        assert main(["train", "mine.toml", "--stage.0.steps", "11", "--out", "run"]) == 0
        config = Path("run/config.toml")
        config.write_text(config.read_text().replace("width = 12", "width = 13").replace("= 18", "= 19"))
        said = complaint(capsys, "train", "--resume", "run")
        assert said.startswith("run/config.toml has model.width = 13, but the run began with 12")

    def test_help_shows_its_options(self, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["train", "--plugin", "my_lstm", "--plugin=my_blocks", "--help"])
        shown = capsys.readouterr().out
        assert "transformer-xl | lstm; default" in shown
        assert "--model.blocks.r.rank\n      of the product of two matrices (a whole number)" in shown
        assert "--model.layers-of-lstm\n      one above the other (a whole number; default: 1)" in shown
        assert "r (low rank), c (count); num_layers" in shown

    def test_recipes_describes_a_file(self, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["recipes", lstm_recipe()]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("small: \n  7.6k parameters, 25 steps + 18 steps on text.txt")

    def test_it_survives_its_own_file(self, code: Path) -> None:
        config = RunConfig.from_toml(Path(lstm_recipe()).read_bytes(), "mine.toml")
        assert config.architecture == "lstm"
        assert RunConfig.from_toml(config.to_toml().encode(), "itself") == config

    def test_it_cannot_be_searched(self, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
        table = search_table(Path("text.txt")) | {"plugins": ["my_lstm"], "model": {"architecture": "lstm"}}
        said = complaint(capsys, "search", recipe(table))
        assert said == "configuration: search needs a model whose blocks have a pattern; lstm has none"

    def test_a_class_may_name_its_architecture_itself(self, code: Path) -> None:
        source = LSTM.replace(
            "    width:", '    architecture: Literal["lstm"] = longspan.option("lstm", help="-")\n    width:'
        )
        (code / "my_lstm.py").write_text(f"from typing import Literal\n{source}")
        config = RunConfig.from_toml(Path(lstm_recipe()).read_bytes(), "mine.toml")
        assert config.to_toml().count("architecture") == 1
        assert RunConfig.from_toml(config.to_toml().encode(), "itself") == config
        names = [option.name for option in documented(RunConfig)]
        assert len(names) == len(set(names))

    def test_a_run_remembers_the_plugins_it_was_given(self, code: Path) -> None:
        lstm_recipe(plugins=["my_blocks"])
        steps = ["--stage.0.steps", "1", "--stage.1.steps", "1"]
        given = ["--plugin", "my_lstm", "--plugin", "my_blocks"]
        assert main(["train", "mine.toml", *given, *steps, "--out", "run"]) == 0
        assert RunFolder(Path("run")).config.plugins == ("my_blocks", "my_lstm")

    def test_a_run_names_what_the_program_had_imported(self, code: Path) -> None:
        """Whatever it uses, and nothing else."""
        import my_blocks  # noqa: F401
        import my_data  # noqa: F401
        import my_lstm

        model = my_lstm.LstmConfig()
        assert RunConfig(model=model).plugins == ("my_lstm",)
        assert RunConfig().plugins == ()
        pattern = {"model": {"pattern": "sc"}}
        assert schema.read(RunConfig, pattern).plugins == ("my_blocks",)
        tokenizer = {"data": {"corpus": "verses", "tokenizer": {"kind": "pairs"}}}
        assert schema.read(RunConfig, tokenizer | {"plugins": ["my_lstm"]}).plugins == ("my_lstm", "my_data")

    def test_what_was_not_imported_is_not_named(self, code: Path) -> None:
        """A notebook, or a module that was made by hand: in this process everything works."""
        exec(compile(LSTM, "by hand", "exec", dont_inherit=True), {"__name__": "by_hand"})
        steps = ["--stage.0.steps", "1", "--stage.1.steps", "1"]
        assert main(["train", lstm_recipe(plugins=[]), *steps, "--out", "run"]) == 0
        assert longspan.load("run").config.plugins == ()

    def test_a_script_may_be_its_own_plugin(self, code: Path) -> None:
        """It runs as a program, and its recipe imports it again."""
        script = code / "my_lstm.py"
        script.write_text(
            f"{LSTM}\nif __name__ == '__main__':\n"
            "    from pathlib import Path\n"
            "    from longspan.config import RunConfig\n"
            "    config = RunConfig.from_toml(Path('mine.toml').read_bytes(), 'mine.toml')\n"
            "    print(type(config.model) is LstmConfig, config.plugins)\n"
        )
        lstm_recipe()
        env = {"PYTHONPATH": str(Path(longspan.__file__).parents[1])}
        found = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, check=False)
        assert found.stdout == "True ('my_lstm',)\n", found.stderr

    def test_load_takes_plugins(self, code: Path) -> None:
        steps = ["--stage.0.steps", "1", "--stage.1.steps", "1"]
        assert main(["train", lstm_recipe(), *steps, "--out", "run"]) == 0
        config = Path("run/config.toml")
        config.write_text(config.read_text().replace('    "my_lstm",\n', ""))
        unload("my_lstm")
        with pytest.raises(
            UserError, match=r"'model.architecture' must be one of .*, not 'lstm' \(if a plugin"
        ):
            longspan.load("run")
        assert longspan.load("run", plugins=["my_lstm"]).config.architecture == "lstm"


class TestBlocks:
    def test_a_letter_in_a_pattern(self, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
        table = small_table(Path("text.txt")) | {"plugins": ["my_blocks"]}
        table["model"] |= {"pattern": "srcf"}
        said = complaint(capsys, "train", recipe(table))
        assert said == "'model.blocks.r.rank' is missing: of the product of two matrices"
        said = complaint(capsys, "train", "mine.toml", "--model.blocks.r.rnak", "3", status=2)
        assert said == "unknown key 'model.blocks.r.rnak'; did you mean 'rank'?"
        said = complaint(capsys, "train", "mine.toml", "--model.blocks.c.rank", "3")
        assert said == "unknown key 'model.blocks.c': no such block (those with options: r)"
        said = complaint(capsys, "train", "mine.toml", "--model.pattern", "sxf")
        assert (
            "the letters are s (attention), f (feed-forward), i (identity), r (low rank), c (count)" in said
        )
        options = ["--model.blocks.r.rank", "3", "--stage.0.steps", "11", "--stage.1.steps", "9"]
        assert main(["train", "mine.toml", *options, "--out", "run"]) == 0
        table = schema.parse_toml(Path("run/config.toml").read_bytes(), "")
        assert table["model"]["blocks"] == {"r": {"rank": 3, "scale": 1.0}}  # defaults are written down
        model = longspan.load("run", device="cpu").model
        assert [type(block).__name__ for block in model.blocks] == [  # type: ignore[union-attr]
            "Attention",
            "LowRank",
            "Count",
            "FeedForward",
        ]
        assert set(model.initial_state(1).flatten()) == {"blocks.0.memory", "blocks.2.read"}
        config = Path("run/config.toml")
        config.write_text(config.read_text().replace("scale = 1.0", "scale = 2.0").replace("= 9", "= 10"))
        said = complaint(capsys, "train", "--resume", "run")
        assert "has model.blocks.r.scale = 2.0, but the run began with 1.0" in said

    def test_transformer_xl_leaves_its_weights_alone(self, code: Path) -> None:
        model = {"architecture": "transformer-xl", "pattern": "sr", "width": 8, "num_heads": 2}
        table = {"plugins": ["my_blocks"], "model": model | {"blocks": {"r": {"rank": 2}}}}
        from longspan.models import build

        block = build(schema.read(RunConfig, table).model, 5).blocks[1]  # type: ignore[index, union-attr]
        assert block.up.weight.unique().tolist() == [0.25]

    def test_a_candidate_of_a_search(self, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
        table = search_table(Path("text.txt")) | {"plugins": ["my_blocks"]}
        table["search"] |= {"candidates": "scr", "cost": "latency"}
        table["model"]["blocks"] = {"r": {"rank": 2}}
        assert main(["search", recipe(table), "--top", "2", "--out", "run"]) == 0
        found = Path("run/found.toml")
        pattern = schema.parse_toml(found.read_bytes(), "")["model"]["pattern"]
        assert len(pattern) == 3
        assert set(pattern) <= set("scr")
        assert f"pattern        {pattern}" in capsys.readouterr().out
        unload("my_blocks")
        assert main(["search", "--resume", "run"]) == 0
        unload("my_blocks")
        steps = ["--stage.0.steps", "1", "--stage.1.steps", "1"]
        assert main(["train", str(found), *steps, "--out", "found"]) == 0
        said = complaint(capsys, "search", "mine.toml", "--search.candidates", "sz", status=2)
        assert "candidates 'sz' has an unknown letter 'z'" in said

    def test_an_architecture_of_ones_own_can_be_searched(self, code: Path) -> None:
        (code / "my_stack.py").write_text(STACK)
        table = search_table(Path("text.txt")) | {"plugins": ["my_stack", "my_blocks"]}
        table["model"] = {"architecture": "searchable"}
        table["search"] |= {"candidates": "fc"}
        assert main(["search", recipe(table), "--out", "run"]) == 0
        assert set(metrics(Path("run"))[-1]["pattern"]) <= set("fc")

    def test_what_is_no_block_is_refused(self, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (code / "wrong.py").write_text(
            "import longspan\nlongspan.register_block('w', 'wrong', lambda model, options: 3)\n"
        )
        table = small_table(Path("text.txt")) | {"plugins": ["wrong"]}
        table["model"] |= {"pattern": "sw"}
        capsys.readouterr()
        assert main(["train", recipe(table)]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.endswith(
            "the build function of block 'w' returned a int: it must return a longspan.Block"
        )
        assert not Path("runs").exists()

    @pytest.mark.parametrize(
        ("returned", "complaint"),
        [
            (
                "h_BTD[..., :5], state",
                "block 1 (Wrong) must return hidden states of the shape [3, 5, 16] and a State, not "
                "(Tensor[3, 5, 5], State)",
            ),
            ("h_BTD", "and a State, not (Tensor[3, 5, 16])"),
            ("h_BTD, {}", "and a State, not (Tensor[3, 5, 16], dict)"),
            (
                "h_BTD, longspan.State({'other': h_BTD[:, 0]})",
                "initial_state has ['blocks.0.memory'], and after a block the state has "
                "['blocks.0.memory', 'blocks.1.other']",
            ),
        ],
    )
    def test_what_a_block_returns_is_checked_before_the_first_step(
        self, returned: str, complaint: str, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (code / "wrong.py").write_text(
            "import longspan\n\nclass Wrong(longspan.Block):\n    def forward(self, h_BTD, state):\n"
            f"        return {returned}\n\n"
            "longspan.register_block('w', 'wrong', lambda model, options: Wrong())\n"
        )
        table = small_table(Path("text.txt")) | {"plugins": ["wrong"]}
        table["model"] |= {"pattern": "sw"}
        capsys.readouterr()
        assert main(["train", recipe(table)]) == 1
        assert complaint in capsys.readouterr().err.splitlines()[-1]
        assert not Path("runs").exists()

    def test_what_a_candidate_returns_is_checked(
        self, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (code / "wrong.py").write_text(
            "import longspan\n\nclass Wrong(longspan.Block):\n    def forward(self, h_BTD, state):\n"
            "        return h_BTD[..., :5], state\n\n"
            "longspan.register_block('w', 'wrong', lambda model, options: Wrong())\n"
        )
        table = search_table(Path("text.txt")) | {"plugins": ["wrong"]}
        table["search"] |= {"candidates": "sw"}
        capsys.readouterr()
        assert main(["search", recipe(table)]) == 1
        assert "block 'w' (Wrong) must return hidden states" in capsys.readouterr().err.splitlines()[-1]
        assert not Path("runs").exists()


STACK = """
from dataclasses import dataclass

from torch import nn

import longspan
from longspan.layers.feed_forward import FeedForward
from longspan.models.pattern import by_pattern, registered_makers
from longspan.output import SoftmaxHead


@dataclass(frozen=True, kw_only=True)
class SearchableConfig:
    width: int = longspan.option(8, help="size of the hidden states")
    pattern: str | None = longspan.option(None, help="the blocks")


def build(config, vocabulary_size, arrange=None):
    makers = {"f": lambda: FeedForward(config.width, 8, dropout=0.0, norm_first=True)}
    blocks = (arrange or by_pattern(config.pattern, 1))(makers | registered_makers(config))
    embedding = nn.Embedding(vocabulary_size, config.width)
    return longspan.Stack(embedding, blocks, SoftmaxHead(config.width, vocabulary_size))


longspan.register_architecture("searchable", SearchableConfig, build)
"""


class TestData:
    def test_a_tokenizer_and_a_corpus(self, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (code / "verses.txt").write_text(Path("text.txt").read_text())
        table = small_table(Path("text.txt")) | {"plugins": ["my_data"]}
        table["data"] = {"corpus": "verses", "tokenizer": {"kind": "pairs", "fill": "."}}
        said = complaint(capsys, "train", recipe(table), "--data.tokenizer.fill", "ab", status=2)
        assert said == "data.tokenizer: fill must be one character"
        said = complaint(capsys, "train", "mine.toml", "--data.tokenizer.flil", "a", status=2)
        assert said == "unknown key 'data.tokenizer.flil'; did you mean 'fill'?"
        assert "drop lowercase" in complaint(
            capsys, "train", "mine.toml", "--data.tokenizer.lowercase", "true"
        )
        steps = ["--stage.0.steps", "11", "--stage.1.steps", "1"]
        assert main(["train", "mine.toml", *steps, "--out", "run"]) == 0
        assert "verses are here" in "".join(capsys.readouterr())
        unload("my_data")
        assert main(["eval", "run"]) == 0
        assert "on the test split of verses" in capsys.readouterr().out
        config = Path("run/config.toml")
        config.write_text(
            config.read_text().replace('fill = "."', 'fill = "x"').replace("steps = 1\n", "steps = 2\n")
        )
        unload("my_data")
        said = complaint(capsys, "train", "--resume", "run")
        assert "data.tokenizer.fill = 'x', but the run began with '.'" in said
        unload("my_data")
        lm = longspan.load("run", plugins=["my_data"])
        assert lm.tokenizer.decode(lm.tokenizer.encode("the ca")) == "the ca"
        assert lm.config.data.corpus == "verses"

    def test_commands_without_a_recipe(self, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (code / "verses.txt").write_text(Path("text.txt").read_text())
        assert main(["data", "list", "--plugin", "my_data"]) == 0
        assert "verses the cat, again and again plugin my_data" in " ".join(capsys.readouterr().out.split())
        assert main(["data", "info", "verses", "--tokenizer", "pairs", "--plugin", "my_data"]) == 0
        assert "verses: pairs tokens, vocabulary" in capsys.readouterr().out
        words = ["cutoffs", "verses", "--clusters", "2", "--tokenizer", "pairs", "--plugin", "my_data"]
        assert main(words) == 0
        unload("my_data")
        said = complaint(capsys, "data", "info", "text.txt", "--tokenizer", "pairs", status=2)
        assert said.startswith("'tokenizer.kind' must be one of byte, character, word")

    def test_a_tokenizer_without_its_plugin(self, code: Path) -> None:
        registry.load_plugins(["my_data"])
        from my_data import PairTokenizer

        from longspan.data import load_tokenizer

        PairTokenizer(["ab"], " ").save(Path("saved"))
        assert load_tokenizer(Path("saved")).vocabulary_size == 1
        unload("my_data")
        with pytest.raises(UserError, match="of the kind 'pairs', which is not registered"):
            load_tokenizer(Path("saved"))


class TestFinding:
    """Where a plugin may come from, and what is said if it cannot be had."""

    @pytest.mark.parametrize("name", ["absent", "absent.part", "json.absent", "json.decoder.absent"])
    def test_a_missing_plugin_is_one_line(
        self, name: str, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said = complaint(capsys, "train", lstm_recipe(plugins=[name]))
        assert said.startswith(f"there is no plugin '{name}'")
        assert said.endswith(": install it, or put its folder on PYTHONPATH")
        assert complaint(capsys, "data", "list", "--plugin", name) == said

    def test_a_run_without_its_plugin(
        self, code: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert (
            main(["train", lstm_recipe(), "--stage.0.steps", "1", "--stage.1.steps", "1", "--out", "run"])
            == 0
        )
        unload("my_lstm")
        (code / "my_lstm.py").rename("my_lstm.txt")
        for words in (["eval", "run"], ["generate", "run"], ["train", "--resume", "run"]):
            said = complaint(capsys, *words)
            assert said.startswith("run/config.toml: there is no plugin 'my_lstm': install it")

    @pytest.mark.parametrize(
        "name", ["", "my_lstm.py", "../my_lstm", "my-lstm", "a..b", ".my_lstm", "import", "1a"]
    )
    def test_a_name_is_that_of_a_module(
        self, name: str, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said = complaint(capsys, "train", lstm_recipe(plugins=[name]))
        assert said.startswith(
            f"'{name}' is not a valid plugin name: use the name of a module, such as my_module"
        )

    @pytest.mark.parametrize("plugins", ["my_lstm", [3], {"a": 1}])
    def test_plugins_are_a_list_of_names(
        self, plugins: Any, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert complaint(capsys, "train", lstm_recipe(plugins=plugins)).startswith("'plugins")

    @pytest.mark.parametrize(
        ("source", "reason", "line"),
        [
            ("import json\n\nx = 1 / 0\n", "ZeroDivisionError: division by zero", 3),
            ("import nothing_of_this_name\n", "ModuleNotFoundError: No module named", 1),
            ("x = 1\nif:\n", "SyntaxError: invalid syntax", 2),
            ("import json\njson.loads('{\\n')\n", "JSONDecodeError: Expecting property name", 2),
            ("raise ValueError('two\\nlines')\n", "ValueError: two lines", 1),
            ("import sys\nsys.exit(3)\n", "SystemExit: 3", 2),
        ],
    )
    def test_a_broken_plugin_is_one_line(
        self, source: str, reason: str, line: int, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (code / "broken.py").write_text(source)
        said = complaint(capsys, "train", lstm_recipe(plugins=["broken"]))
        assert said.startswith(f"the plugin 'broken' could not be imported: {reason}")
        assert said.endswith(f"({code}/broken.py:{line})")

    def test_a_plugin_that_failed_can_be_tried_again(self, code: Path) -> None:
        (code / "my_lstm.py").write_text(f"{LSTM}\nraise ValueError('not yet')\n")
        with pytest.raises(UserError, match="not yet"):
            registry.load_plugins(["my_lstm"])
        assert "lstm" not in registry.ARCHITECTURES
        (code / "my_lstm.py").write_text(LSTM + "\n" * 9)
        registry.load_plugins(["my_lstm"])
        assert "lstm" in registry.ARCHITECTURES

    def test_a_package_is_imported_with_its_parents(self, code: Path) -> None:
        (code / "mine" / "deep").mkdir(parents=True)
        (code / "mine" / "deep" / "model.py").write_text(LSTM)
        registry.load_plugins(["mine.deep.model"])
        assert "lstm" in registry.ARCHITECTURES


HOSTILE = "from pathlib import Path\nPath(__file__).parent.joinpath('executed').touch()\n"


class TestRunFolders:
    """Nothing inside a run folder is ever executed, wherever Python looks for modules."""

    @pytest.fixture
    def hostile(self, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A run whose folder holds a module of its plugin's name; there is no other."""
        assert (
            main(["train", lstm_recipe(), "--stage.0.steps", "1", "--stage.1.steps", "1", "--out", "run"])
            == 0
        )
        unload("my_lstm")
        (code / "my_lstm.py").unlink()
        run = tmp_path / "run"
        (run / "my_lstm.py").write_text(HOSTILE + LSTM)
        return run

    def test_a_module_in_the_run_folder_is_refused(
        self, hostile: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(hostile)
        words = [["eval", "run"], ["generate", "run"], ["train", "--resume", "run"]]
        words += [["bench", "run/config.toml"], ["train", "run/config.toml"], ["recipes", "run/config.toml"]]
        for command in words:
            said = complaint(capsys, *command)
            assert "the plugin 'my_lstm' is inside the run folder" in said
            assert said.endswith("install it, or put its folder on PYTHONPATH")
        with pytest.raises(UserError, match="is inside the run folder"):
            longspan.load(hostile)
        assert not (hostile / "executed").exists()

    def test_from_inside_with_the_current_folder_on_the_path(self, hostile: Path) -> None:
        """`python -m` looks for modules where one stands first."""
        command = [sys.executable, "-m", "longspan", "eval", "."]
        found = subprocess.run(command, cwd=hostile, capture_output=True, text=True, check=False)
        assert found.returncode == 1
        assert "is inside the run folder" in found.stderr
        assert len(found.stderr.splitlines()) == 1
        assert not (hostile / "executed").exists()

    @pytest.mark.parametrize("package", [True, False])
    def test_neither_as_part_of_a_package(
        self, package: bool, hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(tmp_path)  # so that the run folder itself is a package
        if package:
            (hostile / "__init__.py").write_text(HOSTILE)
        config = hostile / "config.toml"
        config.write_text(config.read_text().replace('"my_lstm"', '"run.my_lstm"'))
        with pytest.raises(UserError, match=r"the plugin 'run.my_lstm' is inside the run folder"):
            longspan.load(hostile)
        assert not (hostile / "executed").exists()

    def test_nor_through_a_link(self, hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "linked").symlink_to(hostile)
        monkeypatch.syspath_prepend(tmp_path / "linked")
        with pytest.raises(UserError, match="is inside the run folder"):
            longspan.load(hostile)
        monkeypatch.syspath_prepend(hostile)
        with pytest.raises(UserError, match="is inside the run folder"):
            longspan.load(tmp_path / "linked")
        assert not (hostile / "executed").exists()


class TestRegistering:
    def test_the_same_again_changes_nothing(self, code: Path) -> None:
        registry.load_plugins(["my_lstm", "my_blocks", "my_data"])
        import my_data
        import my_lstm

        longspan.register_architecture("lstm", my_lstm.LstmConfig, my_lstm.LstmModel)
        longspan.register_tokenizer("pairs", my_data.PairTokenizer, config_class=my_data.PairConfig)
        longspan.register_corpus("verses", my_data.verses, about="the cat, again and again")
        with pytest.raises(
            UserError, match="'lstm' is already registered with another object: choose another"
        ):
            longspan.register_architecture("lstm", my_lstm.LstmConfig, lambda config, size: None)
        with pytest.raises(
            UserError,
            match="LstmConfig is already the configuration class of the architecture 'lstm': derive",
        ):
            longspan.register_architecture("other", my_lstm.LstmConfig, my_lstm.LstmModel)
        with pytest.raises(UserError, match="the block 'c' is already registered"):
            longspan.register_block("c", "count", lambda model, options: None)

    @pytest.mark.parametrize(
        ("call", "taken"),
        [
            ("architecture('gpt', LstmConfig, LstmModel)", "architecture 'gpt'"),
            ("block('s', 'mine', lambda model, options: None)", "block 's'"),
            ("corpus('enwik8', lambda say: 'mine.txt')", "corpus 'enwik8'"),
            ("tokenizer('byte', type('T', (), {'fit': 1, 'from_settings': 2}))", "tokenizer 'byte'"),
        ],
    )
    def test_our_own_names_are_taken(
        self, call: str, taken: str, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = LSTM[: LSTM.index("longspan.register_architecture")] + f"longspan.register_{call}\n"
        (code / "my_lstm.py").write_text(source)
        said = complaint(capsys, "train", lstm_recipe())
        line = len(source.splitlines())
        assert said == (
            f"the plugin 'my_lstm' could not be imported: the {taken} comes with longspan: choose another "
            f"name ({code}/my_lstm.py:{line})"
        )

    @pytest.mark.parametrize(
        ("call", "reason"),
        [
            (
                "architecture('a b', LstmConfig, LstmModel)",
                "the architecture name 'a b' is not valid: use letters, digits",
            ),
            ("architecture('a', dict, LstmModel)", "the options of architecture 'a' must be a dataclass"),
            ("architecture('a', LstmConfig, 3)", "the build of architecture 'a' must be a function, not 3"),
            ("architecture('a', Plain, LstmModel)", "Plain.size has no help: declare the options"),
            ("architecture('a', Odd, LstmModel)", "the types of Odd cannot be read: name 'Nowhere' is not"),
            ("block('xy', 'mine', LstmModel)", "a block needs one letter from a to z"),
            ("block('ß', 'mine', LstmModel)", "a block needs one letter from a to z"),
            ("tokenizer('t', LstmModel)", "the tokenizer 't' needs fit(config, corpus)"),
            ("tokenizer('t', 'm:T', options=['size'])", "the options of a tokenizer are vocabulary_size"),
            ("tokenizer('t', 'm:T', config_class=LstmConfig)", "LstmConfig must derive from longspan.config"),
            ("corpus('a.txt', LstmModel)", "the corpus 'a.txt' looks like a file name"),
            ("corpus('a/b', LstmModel)", "the corpus name 'a/b' is not valid: use letters, digits"),
        ],
    )
    def test_mistakes_are_one_line(
        self, call: str, reason: str, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = LSTM[: LSTM.index("longspan.register_architecture")]
        source += "@dataclass\nclass Odd:\n    size: 'Nowhere' = 3\n\n"
        source += f"@dataclass\nclass Plain:\n    size: int = 3\n\nlongspan.register_{call}\n"
        (code / "my_lstm.py").write_text(source)
        said = complaint(capsys, "train", lstm_recipe())
        assert said.startswith(f"the plugin 'my_lstm' could not be imported: {reason}")

    def test_a_build_that_returns_no_model(self, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (code / "my_lstm.py").write_text(
            LSTM.replace("LstmConfig, LstmModel)", "LstmConfig, lambda c, v: c)")
        )
        capsys.readouterr()
        assert main(["train", lstm_recipe()]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.endswith("'lstm' returned a LstmConfig: it must return a longspan.LanguageModel")

    def test_an_option_of_a_type_that_toml_has_not(
        self, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (code / "my_lstm.py").write_text(LSTM.replace("width: int", "width: complex"))
        said = complaint(capsys, "train", lstm_recipe())
        assert said.startswith("'model.width' is declared as <class 'complex'>: an option is int, float")

    def test_options_of_no_architecture(self, code: Path) -> None:
        registry.load_plugins(["my_lstm"])
        import my_lstm

        unload("my_lstm")
        with pytest.raises(ValueError, match="LstmConfig does not belong to an architecture"):
            RunConfig(model=my_lstm.LstmConfig())


class TestEntryPoints:
    """Plugins that are installed."""

    @staticmethod
    def install(code: Path, *modules: str) -> None:
        folder = code / "my_plugins-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugins\nVersion: 1.0\n")
        points = "".join(f"{name.replace('.', '_')} = {name}\n" for name in modules)
        (folder / "entry_points.txt").write_text(f"[longspan.plugins]\n{points}")
        registry._entry_points_loaded = False

    def test_a_name_that_is_not_known_imports_them(
        self, code: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.install(code, "my_lstm")
        lstm_recipe(plugins=[])
        assert "my_lstm" not in sys.modules
        steps = ["--stage.0.steps", "1", "--stage.1.steps", "1"]
        assert main(["train", "mine.toml", *steps, "--out", "run"]) == 0
        assert RunFolder(Path("run")).config.plugins == ("my_lstm",)  # elsewhere it may not be installed
        unload("my_lstm")
        registry._entry_points_loaded = False
        assert main(["eval", "run"]) == 0

    def test_they_are_not_imported_for_what_is_known(self, code: Path) -> None:
        self.install(code, "my_lstm")
        steps = ["--stage.0.steps", "1", "--stage.1.steps", "1"]
        assert main(["train", recipe(small_table(Path("text.txt"))), *steps, "--out", "run"]) == 0
        assert main(["generate", "run", "--tokens", "1"]) == 0
        assert "my_lstm" not in sys.modules

    def test_help_shows_them(self, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.install(code, "my_blocks")
        with pytest.raises(SystemExit):
            main(["train", "--help"])
        assert "--model.blocks.r.rank" in capsys.readouterr().out

    def test_a_broken_one_is_one_line_of_warning(self, code: Path) -> None:
        self.install(code, "broken", "my_lstm", "gone")
        (code / "broken.py").write_text("raise ValueError('no')\n")
        lstm_recipe(plugins=[])
        words = [sys.executable, "-m", "longspan", "recipes", "mine.toml"]
        env = {"PYTHONPATH": f"{code}:{Path(longspan.__file__).parents[1]}"}
        found = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
        assert found.returncode == 0, found.stderr
        assert found.stdout.startswith("small: ")
        warnings = [line for line in found.stderr.splitlines() if line.startswith("longspan:")]
        assert warnings == [
            "longspan: warning: the installed plugin with entry point 'broken' is skipped: the plugin "
            f"'broken' could not be imported: ValueError: no ({code}/broken.py:1)",
            "longspan: warning: the installed plugin with entry point 'gone' is skipped: there is no plugin "
            "'gone': install it, or put its folder on PYTHONPATH",
        ]

    def test_help_of_the_tool_needs_neither_torch_nor_plugins(self, code: Path) -> None:
        self.install(code, "my_lstm")
        script = (
            "import sys\nfrom longspan.cli import main\n"
            "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
            "main(['train', 'enwik9'])\n"
            "print('torch' in sys.modules, 'my_lstm' in sys.modules)\n"
        )
        env = {"PYTHONPATH": f"{code}:{Path(longspan.__file__).parents[1]}"}
        found = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True
        )
        assert found.stdout.splitlines()[-1] == "False False"
