"""What a run writes down while it goes: metrics, spans, what a search wants, TensorBoard."""

from __future__ import annotations

from typing import Any

from torch.utils.tensorboard import SummaryWriter

from longspan.runs import RunFolder, span_line
from longspan.training.journal import Journal

_NO_CURVES = {"nats", "seconds"}  # sums: they only grow, with the tokens and with the steps


class Records:
    """The growing files of a run folder, at the place where a checkpoint left them."""

    def __init__(self, folder: RunFolder, lengths: dict[str, int] | None = None, step: int = 0) -> None:
        paths = {"metrics": folder.metrics, "spans": folder.spans}
        self._search = folder.config.search
        if self._search is not None:
            paths["architecture"] = folder.architecture
        lengths = lengths or dict.fromkeys(paths, 0)
        self._journals = {name: Journal(path, lengths[name]) for name, path in paths.items()}
        # TensorBoard cannot cut its files: it is told to forget what lies beyond the checkpoint.
        self._board = SummaryWriter(str(folder.tensorboard), purge_step=step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """One line of metrics; its `kind` and `step` say what and when."""
        self._journals["metrics"].write(line)
        self._plot(line["kind"], line, line["step"])

    def write_spans(self, step: int, limit: int, spans_LH: list[list[float]]) -> None:
        self._journals["spans"].write(span_line(step, limit, spans_LH))

    def write_architecture(self, step: int, temperature: float, probabilities_BK: list[list[float]]) -> None:
        assert self._search is not None
        line = {"step": step, "temperature": temperature, "candidates": self._search.candidates}
        self._journals["architecture"].write(line | {"probabilities": probabilities_BK})

    def settle(self) -> dict[str, int]:
        """Put everything on the disk; how long the files are."""
        return {name: journal.settle() for name, journal in self._journals.items()}

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()
        self._board.close()

    def _plot(self, prefix: str, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                self._plot(f"{prefix}/{name}", value, step)
            elif isinstance(value, float) and name not in _NO_CURVES:
                self._board.add_scalar(f"{prefix}/{name}", value, step)
