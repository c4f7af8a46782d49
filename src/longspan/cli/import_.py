"""`longspan import`: make a run folder from a checkpoint of an original implementation."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import Any

from longspan.cli.console import add_quiet_option
from longspan.cli.paths import check_parent, expanded
from longspan.errors import UsageError, usage_errors
from longspan.progress import task, tell


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "import",
        help="import a checkpoint of an original implementation",
        description="Make a run folder, for eval and generate, from a checkpoint of an original "
        "implementation. Such a file has no vocabulary. It is rebuilt from the corpus, so give the corpus "
        "that the model was trained on; for fairseq the folder that it prepared. Without a corpus "
        "the run reads and writes token numbers. Whole modules, as SHA-RNN and Transformer-XL save them, are "
        "read without running anything from the file. Options that the file does not contain have the "
        "project's defaults.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=expanded,
        metavar="FILE",
        help="the checkpoint; nothing from it is ever run",
    )
    parser.add_argument(
        "--pretrained",
        metavar="NAME",
        help="instead of FILE, a model that the authors of adaptive span published: enwik8, enwik8_large, "
        "text8 or text8_large; it is downloaded, and its corpus too unless --data names another",
    )
    parser.add_argument(
        "--kind",
        metavar="KIND",
        help="the project of FILE: adaptive-span, fairseq-adaptive-span, sha-rnn, transformer-xl, "
        "hf-transfo-xl or gpt-spans",
    )
    parser.add_argument("--data", metavar="CORPUS", help="the corpus it was trained on")
    parser.add_argument(
        "--config",
        type=expanded,
        metavar="FILE",
        help="JSON with the original's options (default for hf-transfo-xl: config.json next to FILE)",
    )
    parser.add_argument("--out", type=expanded, metavar="RUN", required=True, help="the new run folder")
    add_quiet_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from longspan.interop.original import check_kind
    from longspan.interop.pretrained import find_pretrained
    from longspan.interop.run import import_run
    from longspan.runs import RunFolder

    if (args.file is None) == (args.pretrained is None):
        raise UsageError("give a checkpoint FILE, or the name of a published model with --pretrained")
    if not args.out:  # most likely an unset shell variable
        raise UsageError("--out is empty: give it the new run folder")
    if args.kind is not None:
        with usage_errors():
            check_kind(args.kind)
    out, corpus = Path(args.out), args.data
    RunFolder.must_be_new(out)
    check_parent(out)
    if args.pretrained is not None:
        with usage_errors():
            model = find_pretrained(args.pretrained)
        if args.kind not in (None, model.kind):
            raise UsageError(f"the model '{model.name}' is of the kind {model.kind}: drop --kind")
        corpus = corpus or model.corpus
        file, kind, url = model.fetch(tell), model.kind, model.url
    elif args.kind is None:
        raise UsageError("say with --kind which project FILE is from: 'longspan import --help' lists them")
    else:
        file, kind, url = Path(args.file), args.kind, None
    with task(f"importing {file.name}"):
        import_run(file, kind, out, corpus, args.config, url=url, progress=tell)
    text = "" if corpus else " --data NUMBERS.txt"
    there = quote(str(out))
    print(f"{out}: try 'longspan eval {there}{text}' or 'longspan generate {there}'")
