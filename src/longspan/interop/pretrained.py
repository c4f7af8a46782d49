"""Models that the authors of adaptive span published: where they are, and what they were trained on.

No checksums are published. The files are read without running anything from them, and the SHA-256 of an
imported file is noted in its run folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longspan.data.download import Progress, download
from longspan.errors import UserError, nearest
from longspan.home import home

SERVER = "https://dl.fbaipublicfiles.com/adaptive-span"


@dataclass(frozen=True)
class Pretrained:
    """A published checkpoint of the kind `adaptive-span`."""

    name: str
    corpus: str
    kind: str = "adaptive-span"

    @property
    def url(self) -> str:
        return f"{SERVER}/{self.name}.pt"

    @property
    def path(self) -> Path:
        """Where the file is kept on this machine."""
        return home() / "pretrained" / f"{self.kind}-{self.name}.pt"

    def fetch(self, progress: Progress) -> Path:
        """The file, downloaded if it is not there."""
        if not self.path.is_file():
            reason = download(self.url, self.path, None, progress)
            if reason is not None:
                raise UserError(
                    f"could not download the model '{self.name}' ({reason}): get {self.url} on another "
                    f"machine, put it at {self.path}, and run the same command again"
                )
        return self.path


PRETRAINED = {
    model.name: model
    for model in (
        Pretrained("enwik8", "enwik8"),
        Pretrained("enwik8_large", "enwik8"),
        Pretrained("text8", "text8"),
        Pretrained("text8_large", "text8"),
    )
}


def find_pretrained(name: str) -> Pretrained:
    if name not in PRETRAINED:
        known = ", ".join(PRETRAINED)
        raise UserError(f"there is no pretrained model '{name}'{nearest(name, PRETRAINED)} (known: {known})")
    return PRETRAINED[name]
