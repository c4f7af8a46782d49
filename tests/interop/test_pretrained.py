"""`longspan import --pretrained`: from a server, from a file put there by hand, or one line."""

from __future__ import annotations

import hashlib
import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import longspan
from longspan.cli import main
from longspan.interop import pretrained
from longspan.runs import RunFolder
from tests.interop.checkpoints import Original
from tests.interop.test_import import WORDS

NAME = "enwik8_large"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_HOME", str(tmp_path / "home"))
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
    (tmp_path / "words.txt").write_text(f"{WORDS}\n" * 60, encoding="utf-8")
    return tmp_path / "home"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "served").mkdir()
    handler = partial(Quiet, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        monkeypatch.setattr(pretrained, "SERVER", f"http://127.0.0.1:{found.server_port}")
        yield tmp_path / "served"
        found.shutdown()
        thread.join()


def command(tmp_path: Path, *more: str) -> list[str]:
    data = str(tmp_path / "words.txt")
    return ["import", "--pretrained", NAME, "--data", data, "--out", str(tmp_path / "run"), *more]


def test_a_published_model_is_downloaded_and_its_hash_is_noted(tmp_path, home, server, capsys):
    made = Original.of("fixed_span")
    content = made.save(server / f"{NAME}.pt", legacy=True).read_bytes()
    assert main(command(tmp_path)) == 0
    assert (home / "pretrained" / f"adaptive-span-{NAME}.pt").read_bytes() == content
    digest = hashlib.sha256(content).hexdigest()
    assert digest in RunFolder.open(tmp_path / "run").config.description
    found = longspan.load(str(tmp_path / "run"), device="cpu")
    assert found.config.data.tokenizer.kind == "adaptive-span"
    assert found.model.get_parameter("embedding.weight").equal(made.tensors["in_emb.weight"])
    capsys.readouterr()
    words = ["--device", "cpu", "--block-length", "16", "--batch-size", "2", "--json"]
    assert main(["eval", str(tmp_path / "run"), *words]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 90


def test_without_a_network_it_says_what_to_fetch_and_where_to_put_it(tmp_path, home, monkeypatch, capsys):
    monkeypatch.setattr(pretrained, "SERVER", "http://127.0.0.1:9")  # nothing listens there
    assert main(command(tmp_path)) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    place = home / "pretrained" / f"adaptive-span-{NAME}.pt"
    assert f"get http://127.0.0.1:9/{NAME}.pt" in message
    assert f"put it at {place}" in message
    assert not (tmp_path / "run").exists()
    assert not place.exists()
    place.parent.mkdir(parents=True, exist_ok=True)
    Original.of("fixed_span").save(place)
    assert main(command(tmp_path)) == 0


def test_a_model_that_the_server_does_not_have_is_one_line(tmp_path, home, server, capsys):
    assert main(command(tmp_path)) == 1
    assert "404" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--pretrained", "enwik9"],
            "did you mean 'enwik8'? (known: enwik8, enwik8_large, text8, text8_large)",
        ),
        (["--pretrained", "text8", "--kind", "sha-rnn"], "drop --kind"),
        (["--pretrained", "text8", "c.pt"], "give a checkpoint FILE, or"),
        ([], "give a checkpoint FILE, or"),
        (["c.pt"], "say with --kind"),
    ],
)
def test_mistakes_are_one_line(tmp_path, home, capsys, words, message):
    assert main(["import", *words, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_the_names_are_those_of_the_published_files():
    urls = {model.url for model in pretrained.PRETRAINED.values()}
    base = "https://dl.fbaipublicfiles.com/adaptive-span/"
    assert urls == {f"{base}{name}.pt" for name in ("enwik8", "enwik8_large", "text8", "text8_large")}
