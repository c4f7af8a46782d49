"""`longspan serve`: completions and sessions over HTTP, and a page."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli.console import say
from longspan.cli.paths import as_path
from longspan.cli.plugin_option import add_plugin_option
from longspan.errors import UsageError, UserError

if TYPE_CHECKING:
    from longspan.serving.limits import Limits

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
HOST, PORT = "127.0.0.1", 8000
KEY = "LONGSPAN_API_KEY"
MEBIBYTE = 1 << 20


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve models over HTTP, with a page to try them",
        description="Serve trained models: OpenAI's completions, sessions that keep the state of a text, "
        "scores, metrics, and a page for a browser. Only this machine can connect unless --host says "
        f"otherwise. An API key is read from --api-key-file or from {KEY}.",
    )
    parser.add_argument("folders", nargs="+", type=as_path, metavar="RUN", help="run folders to serve")
    parser.add_argument("--host", metavar="ADDRESS", help=f"address to listen on (default: {HOST})")
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"0: any free one (default: {PORT})"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="default: best")
    parser.add_argument(
        "--watch",
        action="append",
        default=[],
        type=as_path,
        metavar="RUN",
        help="show a run that is being trained in the page, besides those that are served (may be repeated)",
    )
    parser.add_argument(
        "--sessions",
        type=as_path,
        metavar="FOLDER",
        help="where sessions are saved (default: a folder in LONGSPAN_HOME that only you can read)",
    )
    _add_limits(parser)
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time for running requests to finish after SIGTERM or Ctrl-C (default: 10)",
    )
    parser.add_argument("--api-key-file", type=as_path, metavar="FILE", help="clients must send this key")
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="pages of this origin may ask, such as https://example.org (may be repeated)",
    )
    add_plugin_option(parser)
    parser.set_defaults(run=run, smaller="serve fewer runs, or lower --slots and --session-memory")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    for name, what in (
        ("--slots", "texts that are generated at once (default: 32 on a CPU, 64 on a GPU)"),
        ("--max-prompt-tokens", "of the prompts of a request (default: 131072)"),
        ("--max-tokens", "that a request may ask for (default: 16384)"),
        ("--max-sessions", "in memory and on disk (default: 1024)"),
        ("--queue", "requests that may wait (default: 256)"),
    ):
        parser.add_argument(name, type=int, metavar="N", help=what)
    parser.add_argument(
        "--session-memory",
        type=int,
        metavar="MB",
        help="memory for sessions, in MiB; those that were not used for longest go to disk (default: 1024)",
    )


def run(args: argparse.Namespace) -> None:
    _check(args)
    _check_installed()
    key = _key(args)
    from longspan.serving.http.server import address, bind, serve
    from longspan.serving.start import Options, rules_for, start

    host = HOST if args.host is None else args.host
    options = Options(
        folders=args.folders,
        watched=args.watch,
        checkpoint=args.checkpoint,
        device=args.device,
        sessions=args.sessions,
        limits=_limits(args),
    )
    with bind(host, args.port) as listening, start(options) as service:
        rules = rules_for(service.limits, any_host=args.host is not None, origins=args.allow_origin, key=key)
        where = address(listening)
        names = ", ".join(service.models)
        serve(service, rules, listening, args.grace, lambda: print(f"serving {names} at {where}", flush=True))
    say("stopped")


def _check(args: argparse.Namespace) -> None:
    """What can be seen in the words of the command."""
    if not 0 <= args.port < 1 << 16:
        raise UsageError(f"--port must be between 0 and 65535, not {args.port}")
    if args.host == "":
        raise UsageError("--host is empty: give it an address or leave it out")
    if not (math.isfinite(args.grace) and 0 <= args.grace <= 86_400):
        raise UsageError(f"--grace must be between 0 and 86400 seconds, not {args.grace:g}")
    for option in ("slots", "max_prompt_tokens", "max_tokens", "max_sessions", "session_memory"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UsageError(f"--{option.replace('_', '-')} must be at least 1, not {value}")
    if args.queue is not None and args.queue < 0:
        raise UsageError(f"--queue must be 0 or more, not {args.queue}")
    for origin in args.allow_origin:
        _check_origin(origin)


def _check_origin(origin: str) -> None:
    scheme, separator, rest = origin.partition("://")
    if origin != "*" and (scheme not in ("http", "https") or not separator or not rest or "/" in rest):
        raise UsageError(
            f"--allow-origin must be like https://example.org or http://localhost:3000, not {origin!r}"
        )


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the server needs {', '.join(missing)}: pip install 'longspan[serve]'")


def _key(args: argparse.Namespace) -> bytes | None:
    """The API key; never an argument, since other users can see those."""
    if args.api_key_file is None:
        found, source = os.environ.get(KEY), KEY
        if found is None:
            return None
        key = os.fsencode(found)
    else:
        source = str(args.api_key_file)
        key = _key_file(args.api_key_file)
    key = key.strip()
    if not key or len(key) > 1_000 or not all(33 <= char <= 126 for char in key):
        raise UserError(f"{source} holds no API key: one line of letters, digits and signs without blanks")
    return key


def _key_file(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(f"there is no file {path} with an API key")
    with path.open("rb") as file:
        return file.read(1 << 16)


def _limits(args: argparse.Namespace) -> Limits:
    from longspan.serving.limits import Limits

    memory = None if args.session_memory is None else args.session_memory * MEBIBYTE
    given = {
        "slots": args.slots,
        "prompt_tokens": args.max_prompt_tokens,
        "generated_tokens": args.max_tokens,
        "sessions": args.max_sessions,
        "waiting": args.queue,
        "session_bytes": memory,
    }
    return Limits(**{name: value for name, value in given.items() if value is not None})
