"""`longspan generate`: continue a text with a trained model."""

from __future__ import annotations

import argparse
import json
import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from longspan.cli.console import add_quiet_option
from longspan.cli.paths import expanded
from longspan.cli.plugin_option import add_plugin_option
from longspan.errors import UsageError, usage_errors
from longspan.progress import task

if TYPE_CHECKING:
    from longspan.language_model import GeneratedText, LoadedModel
    from longspan.reading import TextState

SETTINGS = ("tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop")


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue a text with a trained model",
        description="Continue a text and print it token by token. Without a prompt the model starts as at "
        "the beginning of a line.",
    )
    parser.add_argument("folder", type=expanded, metavar="RUN", help="the run folder")
    parser.add_argument("--prompt", default="", help="the text to continue; - reads it from standard input")
    parser.add_argument(
        "--prompts",
        type=expanded,
        metavar="FILE",
        help="continue each line of a file; in a .jsonl file a line is a text or an object with 'prompt'; "
        "- reads standard input",
    )
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="continuations of each prompt (default: 1)"
    )
    parser.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="number of tokens (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0: always the most likely token (default: 0.8)",
    )
    parser.add_argument("--top-k", type=int, metavar="N", help="sample from the N most likely tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens with total probability P"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="multiplies the log-probability of tokens generated before; above 1: fewer repetitions "
        "(default: 1)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text (may be repeated; a line end is $'\\n' in a shell)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="the same seed gives the same text; sample n has seed N + n - 1"
    )
    parser.add_argument(
        "--log-probs", action="store_true", help="show every token with its log-probability in nats"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line and sample")
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="read a line, continue the text, and so on; the model keeps its memory of all before",
    )
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="default: best")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: auto)")
    add_plugin_option(parser)
    add_quiet_option(parser)
    parser.set_defaults(run=run, smaller="give a shorter prompt, or another --device")


def run(args: argparse.Namespace) -> None:
    _check(args)
    from longspan.cli.prompts import prompts
    from longspan.language_model import load

    lm = load(args.folder, args.checkpoint, args.device)
    settings = {name: getattr(args, name) for name in SETTINGS}
    if args.interactive:
        from longspan.cli.interactive import take_turns

        take_turns(lm, args.prompt, args.seed, settings)
        return
    asked = prompts(args.prompt, args.prompts)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    several = len(asked) * args.samples > 1
    for number, prompt in enumerate(asked):
        lm.warn_of_unknown(prompt)
        with task("reading the prompt", "tokens") as progress:
            state = lm.read(prompt, progress=progress)  # once for all samples; errors before any output
        for sample in range(args.samples):
            if several and not args.json:
                print(f"==> prompt {number + 1} of {len(asked)}, sample {sample + 1} of {args.samples} <==")
            show = _print_json if args.json else _print_text
            show(args, lm, prompt, state, seed + sample, settings)


def _check(args: argparse.Namespace) -> None:
    from longspan.generation import check_sampling
    from longspan.stop_strings import StopStrings

    with usage_errors():
        check_sampling(args.tokens, args.temperature, args.top_k, args.top_p, args.repetition_penalty)
        StopStrings(args.stop)
    if args.samples < 1:
        raise UsageError(f"--samples must be at least 1, not {args.samples}")
    if args.prompts == "":
        raise UsageError("--prompts is empty: give it a file or leave it out")
    if args.prompts is not None and args.prompt:
        raise UsageError("--prompt and --prompts cannot be combined: give one")
    alone = {"--prompts": args.prompts, "--samples": args.samples > 1, "--json": args.json}
    alone |= {"--log-probs": args.log_probs, "--prompt -": args.prompt == "-"}
    for option, value in alone.items():
        if args.interactive and value:
            raise UsageError(f"--interactive and {option} cannot be combined: leave one out")


def _print_text(
    args: argparse.Namespace,
    lm: LoadedModel,
    prompt: str,
    state: TextState,
    seed: int,
    settings: dict[str, Any],
) -> None:
    if args.log_probs:
        text = _generated(lm, state, seed, settings)
        print(prompt, text, sep="")
        for token, log_prob in zip(_texts(lm, text.ids), text.log_probs, strict=True):
            print(f"{log_prob:10.4f}  {token!r}")
        return
    pieces = lm.stream(state=state, seed=seed, **settings)
    first = next(pieces)  # errors in the settings appear here, before any output
    with task("generating", "tokens", args.tokens, prints=True) as progress:
        print(prompt, first, sep="", end="", flush=True)
        for number, piece in enumerate(pieces, 2):
            print(piece, end="", flush=True)
            progress(min(number, args.tokens))
    print()


def _print_json(
    args: argparse.Namespace,
    lm: LoadedModel,
    prompt: str,
    state: TextState,
    seed: int,
    settings: dict[str, Any],
) -> None:
    text = _generated(lm, state, seed, settings)
    line: dict[str, Any] = {"prompt": prompt, "text": str(text), "seed": seed, "tokens": len(text.ids)}
    line |= {"log_prob": math.fsum(text.log_probs), "stop": text.stop}
    if args.log_probs:
        line["token_texts"], line["token_log_probs"] = _texts(lm, text.ids), text.log_probs
    print(json.dumps(line), flush=True)


def _generated(lm: LoadedModel, state: TextState, seed: int, settings: dict[str, Any]) -> GeneratedText:
    with task("generating", "tokens", settings["tokens"]) as progress:
        return lm.generate(state=state, seed=seed, progress=progress, **settings)


def _texts(lm: LoadedModel, ids: Sequence[int]) -> list[str]:
    """The text of each token; bytes that are no whole character as \\xe2."""
    pieces = lm.tokenizer.pieces()
    return [pieces[token].decode("utf-8", "backslashreplace") for token in ids]
