"""`longspan report`: a page about one or more runs, or a figure of them."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from longspan.cli.console import add_quiet_option
from longspan.cli.paths import as_path, check_writable
from longspan.errors import UsageError, UserError
from longspan.progress import tell

FORMATS = ("html", "png", "svg", "gif")
WATCH_SECONDS = 5.0


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="a page with curves, spans and samples of runs",
        description="Write one HTML file that opens offline: summary, curves, spans, masks, search and "
        "samples over training; several runs are compared. It reads the run folders only.",
    )
    parser.add_argument("folders", nargs="+", type=as_path, metavar="RUN", help="run folders")
    parser.add_argument(
        "--out",
        type=as_path,
        metavar="FILE",
        help="a new file (default: RUN/report.html, which is replaced; for several runs: report.html here)",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="html; png or svg: a figure of curves and spans; gif: the spans over training "
        "(default: as --out ends, else html)",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help=f"write the page again every {WATCH_SECONDS:g} seconds until all runs are finished; an open "
        "page reloads itself",
    )
    add_quiet_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    kind = _format(args)
    if args.watch and kind != "html":
        raise UsageError("--watch refreshes the HTML page: leave out --watch or --format")
    if kind == "gif" and len(args.folders) > 1:
        raise UsageError("a GIF shows the spans of one run: give one RUN")
    out = _out(args, kind)
    if kind == "html":
        _write_page(args, out)
    else:
        _draw(args, out, kind)
    print(f"report: {out}")


def _format(args: argparse.Namespace) -> str:
    ending = "" if args.out is None else args.out.suffix.lstrip(".")
    kind: str = args.format or (ending if ending in FORMATS else "html")
    if args.out is not None and ending != kind:
        raise UsageError(f"--out must end in .{kind} for this format, not in {args.out.name}")
    return kind


def _out(args: argparse.Namespace, kind: str) -> Path:
    name = f"report.{kind}"
    if args.out is None and len(args.folders) == 1:
        return Path(args.folders[0] / name)
    out = Path(name) if args.out is None else Path(args.out)
    if out.exists():
        raise UserError(f"{out} exists already: give --out another name")
    check_writable(out)
    if not out.absolute().parent.is_dir():
        raise UserError(f"there is no folder {out.parent}: create it, or choose another --out")
    return out


def _write_page(args: argparse.Namespace, out: Path) -> None:
    from longspan.inspection.report import write_report

    if not args.watch:
        write_report(args.folders, out)
        return
    said = False
    while not all(one["finished"] for one in write_report(args.folders, out, reload_seconds=WATCH_SECONDS)):
        if not said:
            tell(f"{out} is refreshed until the training is finished; stop with Ctrl-C")
            said = True
        time.sleep(WATCH_SECONDS)
    write_report(args.folders, out)  # it does not reload itself any more


def _draw(args: argparse.Namespace, out: Path, kind: str) -> None:
    from longspan.inspection.report import several
    from longspan.inspection.report.figure import animate_report, draw_report

    runs = several(args.folders)
    if kind == "gif":
        animate_report(runs[0], out)
    else:
        draw_report(runs, out, kind)
