"""The configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from longspan.config import schema
from longspan.config.data import DataConfig
from longspan.config.model import AdaptiveSpanConfig, ModelConfig
from longspan.config.pattern import with_defaults
from longspan.config.schema import chosen_section, option, section
from longspan.config.search import SearchConfig
from longspan.config.stage import StageConfig
from longspan.config.training import EvaluationConfig, TrainingConfig
from longspan.config.transformer_xl import TransformerXLConfig
from longspan.errors import UserError
from longspan.registry import ARCHITECTURES, BLOCKS, CORPORA, TOKENIZERS, load_plugins


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run computes; `config.toml` of a run folder holds exactly this."""

    name: str = option("run", help="name of the run folder")
    description: str = option("", help="one line of description")
    plugins: tuple[str, ...] = option(
        (), help="Python modules to import first; they register what they add", first=load_plugins
    )
    data: DataConfig = section(DataConfig, help="the text")
    model: ModelConfig = chosen_section(
        AdaptiveSpanConfig, "architecture", ARCHITECTURES, help="the model", tag_help="the architecture"
    )
    search: SearchConfig | None = option(
        None, help="for 'longspan search': the search for the pattern of the blocks"
    )
    training: TrainingConfig = section(TrainingConfig, help="options that all stages share")
    stage: tuple[StageConfig, ...] = option((), help="the stages of training, in order")
    evaluation: EvaluationConfig = section(EvaluationConfig, help="how held-out text is scored")
    expected: dict[str, Any] = option({}, help="published numbers for this recipe")

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name or not self.name.isprintable():
            raise ValueError(f"name must be usable for a folder: printable, without '/', not {self.name!r}")
        if ARCHITECTURES.name_of(type(self.model)) is None:
            raise ValueError(
                f"{type(self.model).__name__} does not belong to an architecture: register one with "
                "longspan.register_architecture"
            )
        if self.search is not None and not hasattr(self.model, "pattern"):
            raise ValueError(
                f"search needs a model whose blocks have a pattern; {self.architecture} has none"
            )
        if self.search is not None and getattr(self.model, "pattern", None) is not None:
            raise ValueError("search finds the pattern: leave out model.pattern or [search]")
        self._check_long_attention()
        if self.search is not None and getattr(getattr(self.model, "span", None), "windows", None):
            raise ValueError("search finds which blocks attend: leave out model.span.windows or [search]")

        self._complete_block_options()
        self._complete_plugins()
        if self.training.at_end == "stop" and any(stage.epochs for stage in self.stage):
            raise ValueError("epochs need training.at_end = 'restart': with 'stop' the text is read once")
        segment = self.training.segment_length
        for stage in self.stage:
            if len(stage.multi_token) >= self.block_length(stage):
                raise ValueError(
                    f"multi_token of stage {stage.name!r} has {len(stage.multi_token)} weights: they must be "
                    f"fewer than the tokens of a block, {self.block_length(stage)}"
                )
            if segment is not None and segment % (stage.block_length or 1):
                raise ValueError(
                    f"training.segment_length, {segment}, must be a multiple of the block_length of stage "
                    f"{stage.name!r}, {stage.block_length}"
                )

    @property
    def architecture(self) -> str:
        """The registered name of the model's architecture."""
        return ARCHITECTURES.name_of(type(self.model)) or ""

    @property
    def _letters(self) -> str:
        """Of all blocks that the model has or, in a search, may get."""
        pattern = getattr(self.model, "pattern", None) or (self.search.candidates if self.search else "")
        return pattern if isinstance(pattern, str) else ""

    def _complete_plugins(self) -> None:
        """A run names all plugins that it needs, also those that the program had imported before."""
        needed = [
            ARCHITECTURES.plugin_of(self.architecture),
            *map(BLOCKS.plugin_of, self._letters),
            TOKENIZERS.plugin_of(self.data.tokenizer.kind),
            CORPORA.plugin_of(self.data.corpus),
        ]
        plugins = dict.fromkeys([*self.plugins, *(plugin for plugin in needed if plugin is not None)])
        object.__setattr__(self, "plugins", tuple(plugins))

    def _complete_block_options(self) -> None:
        """The configuration determines what a run computes, including defaults of plugins."""
        used = self._letters
        given = getattr(self.model, "blocks", None)
        if isinstance(given, dict) and (complete := with_defaults(given, used)) != given:
            object.__setattr__(self, "model", replace(self.model, blocks=complete))

    def _check_long_attention(self) -> None:
        if not isinstance(self.model, AdaptiveSpanConfig | TransformerXLConfig):
            return
        given = getattr(self.model, "long_memory_length", None) is not None
        wanted = self.search is not None and "l" in self.search.candidates
        if wanted and getattr(self.model, "span", None) is not None:
            raise ValueError("long attention cannot be combined with a span: leave l out of the candidates")
        if wanted and not given:
            raise ValueError("the candidates include long attention, l: give model.long_memory_length")
        if given and not wanted and getattr(self.model, "pattern", None) is None:
            raise ValueError(
                "model.long_memory_length has no effect without l in the pattern or the candidates"
            )

    def block_length(self, stage: StageConfig) -> int:
        return stage.block_length or self.training.block_length

    @staticmethod
    def from_toml(content: bytes, source: str) -> RunConfig:
        table = schema.parse_toml(content, source)
        try:
            return schema.read(RunConfig, table)
        except UserError as problem:
            raise UserError(f"{source}: {problem}") from None

    def to_toml(self) -> str:
        return schema.format_toml(schema.write(self))
