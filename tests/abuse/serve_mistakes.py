"""Mistakes with `serve`: addresses, limits, keys, folders and runs. No server ever starts."""

from __future__ import annotations

from tests.abuse.mistake import failure, usage
from tests.abuse.run_mistakes import CONFIG, MISFIT, TOKENIZER, WEIGHTS

LIMITS = ("--slots", "--max-tokens", "--max-prompt-tokens", "--max-sessions", "--session-memory")
START = "serve run --port 0"

MISTAKES = [
    # addresses
    *(usage(f"serve run --port={port}", "--port must be between 0 and 65535") for port in (-1, 65536, 10**9)),
    usage("serve run --port 0 --host ''", "--host is empty"),
    failure("serve run --port 0 --host 192.0.2.1", r"cannot listen on 192\.0\.2\.1"),
    failure(["serve", "run", "--port", "0", "--host", "\u00e9" * 80], "cannot listen on host"),
    failure(["serve", "run", "--port", "0", "--host", "a..b"], "cannot listen on host"),
    *(
        usage(["serve", "run", "--allow-origin", origin], "--allow-origin must be like")
        for origin in ("", "example.org", "ftp://example.org", "https://", "https://example.org/", "null")
    ),
    # limits
    *(usage(f"serve run {option} 0", f"{option} must be at least 1, not 0") for option in LIMITS),
    *(usage(f"serve run {option}=-5", f"{option} must be at least 1, not -5") for option in LIMITS),
    usage("serve run --queue=-1", "--queue must be 0 or more"),
    usage("serve run --grace=-1", "--grace must be between"),
    usage("serve run --grace inf", "--grace must be between"),
    usage("serve run --session-memory x", "--session-memory: invalid int value: 'x'"),
    # keys
    failure(f"{START} --api-key-file nowhere", "there is no file nowhere with an API key"),
    failure(f"{START} --api-key-file taken", "there is no file taken with an API key"),
    failure(f"{START} --api-key-file pipe", "there is no file pipe with an API key"),
    failure(f"{START} --api-key-file empty.txt", "empty.txt holds no API key"),
    failure(f"{START} --api-key-file text.txt", "text.txt holds no API key"),
    usage("serve run --api-key secret", "unknown option '--api-key'"),
    # folders
    failure(f"{START} --sessions text.txt", "text.txt is not a folder"),
    failure(f"{START} --sessions pipe", "pipe is not a folder"),
    failure(f"{START} --sessions nowhere/new", "there is no folder .*nowhere: create it"),
    failure(f"{START} --watch nowhere", "there is no run folder nowhere"),
    failure(f"{START} --watch taken", "taken is not a run folder"),
    failure(f"{START} --watch damaged/config-cut", "config.toml is not valid TOML"),
    # runs
    *(
        failure(f"serve --port 0 {run}", line)
        for run, line in {
            "nowhere": "no run folder nowhere",
            "text.txt": "no run folder text.txt: it is a file",
            "taken": "taken is not a run folder: it has no config.toml",
            "''": "run folder",
            "run nowhere": "no run folder nowhere",
        }.items()
    ),
    usage("serve --port 0 run run", "run is given twice"),
    usage("serve --port 0 run ./run/.", "is given twice"),
    usage("serve --port 0 run --watch run", "run is given twice"),
    *(
        failure(f"serve --port 0 damaged/{run}", line)
        for run, line in (CONFIG | TOKENIZER | WEIGHTS | MISFIT).items()
    ),
]
