"""`longspan serve` as a process: it survives SIGKILL, stops on SIGTERM, and checks what it is given."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.serving.engine import SLOTS_CPU, SLOTS_GPU
from longspan.serving.http.schemas import MAX_CHOICES
from longspan.serving.limits import Limits
from tests.serving.running import Answer, Client, wait_until
from tests.using.tiny import run_folder

SECONDS = 120  # to start on a busy machine


@contextmanager
def served(*words: str, **environment: str) -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    """A server, until the block ends; its address is in the one line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "longspan", "serve", *words, "--port", "0", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving .* at (http://127\.0\.0\.1:\d+)\n", line)
        assert found is not None, line + (process.stderr.read() if process.stderr else "")
        yield Client(found[1]), process
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGSPAN_HOME", str(folder / "home"))
        return run_folder(folder / "tiny").path


@pytest.mark.timeout(3 * SECONDS)
def test_saved_sessions_survive_a_kill(run: Path, tmp_path: Path) -> None:
    """SIGKILL, also while another session is being saved; the text goes on as if nothing had happened."""
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched" / "config.toml").write_text('name = "in training"')
    words = (str(run), "--sessions", str(tmp_path / "sessions"), "--watch", str(tmp_path / "watched"))
    body = {"max_tokens": 8, "seed": 5}
    with served(*words) as (client, process):
        shown = [(one["name"], one["model"]) for one in client.get("/v1/runs").json["data"]]
        assert shown == [("tiny", "tiny"), ("watched", None)]
        assert client.get("/v1/runs/watched").json["name"] == "in training"
        kept, lost = client.session("a long story "), client.session("forgotten")
        assert client.post(f"/v1/sessions/{kept}/save").json["saved"]
        fork = client.post(f"/v1/sessions/{kept}/fork").json["id"]
        wanted = client.post(f"/v1/sessions/{fork}/generate", body).text
        process.send_signal(signal.SIGKILL)
        assert process.wait(SECONDS) == -signal.SIGKILL
    (tmp_path / "sessions" / f"{'x' * 22}.session").write_bytes(b"damaged")
    with served(*words, "--grace", "0.2", LONGSPAN_API_KEY="key") as (client, process):
        client = Client(client.url, {"Authorization": "Bearer key"})
        found = client.get("/v1/sessions").json["data"]
        assert [(one["id"], one["saved"], one["tokens"]) for one in found] == [(kept, True, 13)]
        assert client.get(f"/v1/sessions/{lost}").status == 404
        assert client.post(f"/v1/sessions/{kept}/generate", body).text == wanted
        assert Client(client.url).get("/v1/models").status == 401
        answers = list[Answer]()
        asking = threading.Thread(
            target=lambda: answers.append(client.complete("a", max_tokens=16_000, stream=True))
        )
        asking.start()
        wait_until(lambda: 'longspan_running{model="tiny"} 1.0' in client.get("/metrics").body.decode())
        process.send_signal(signal.SIGTERM)
        asking.join(SECONDS)
        assert answers[0].status == 200
        assert answers[0].events[-1]["error"]["code"] == "server_stopping"
        said = process.communicate(timeout=SECONDS)[1]
        assert process.returncode == 0
        assert said.splitlines()[-1] == "stopped"
        assert "Traceback" not in said


def test_a_port_that_is_taken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", str(run), "--port", port]) == 1
    assert re.search(r"cannot listen on 127\.0\.0\.1, port \d+: .*another --port", capsys.readouterr().err)


def test_what_is_missing_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.cli.serve.NEEDED", ("fastapi", "no_such_module"))
    assert main(["serve", str(run)]) == 1
    said = capsys.readouterr().err
    assert said == "longspan: the server needs no_such_module: pip install 'longspan[serve]'\n"


def test_help_does_not_import_the_server() -> None:
    program = (
        "import sys; from longspan.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'fastapi', 'uvicorn', 'pydantic', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, timeout=SECONDS)


@pytest.mark.parametrize("content", ["", "two words", "caf\u00e9", "x" * 2000])
def test_a_bad_key(
    content: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    assert main(["serve", str(run), "--api-key-file", str(file)]) == 1
    assert "holds no API key" in capsys.readouterr().err
    monkeypatch.setenv("LONGSPAN_API_KEY", content)
    assert main(["serve", str(run)]) == 1
    assert "LONGSPAN_API_KEY holds no API key" in capsys.readouterr().err


def test_defaults_in_help_and_docs_are_those_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    limits = Limits()
    for option, value in {
        "max-prompt-tokens": limits.prompt_tokens,
        "max-tokens": limits.generated_tokens,
        "max-sessions": limits.sessions,
        "queue": limits.waiting,
        "session-memory": limits.session_bytes >> 20,
    }.items():
        assert re.search(rf"--{option} (N|MB) [^-]*\(default: {value}\)", said), option
        assert re.search(rf"`--{option}` \| {value}\b", page), option
    assert f"(default: {SLOTS_CPU} on a CPU, {SLOTS_GPU} on a GPU)" in said
    assert f"| {SLOTS_CPU}, on a GPU {SLOTS_GPU} |" in page
    assert f"| tokens of a text to inspect | | {limits.inspected_tokens} |" in page
    assert f"| prompts times `n` | | {MAX_CHOICES} |" in page


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_benchmark_runs(run: Path) -> None:
    words = ["--clients", "4", "--seconds", "3", "--tokens", "20", "--warm-up", "0.5", "--device", "cpu"]
    script = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"
    ended = subprocess.run(
        [sys.executable, str(script), str(run), *words], capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert (found["compared"], found["different"], found["together"]["errors"]) == (4, [], 0)
    assert found["together"]["tokens_per_second"] > 0
    assert found["ratio"] > 0
