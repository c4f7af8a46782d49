"""The report as one HTML file with everything inside: data, charts, style. It makes no request.

The content security policy allows only the scripts and the style of this file, by their hashes, and no
connection. All text of a run is escaped in the page, or is inside a JSON block in which `<` is written as
`\\u003c`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from string import Template

from longspan.files import whole_file
from longspan.inspection.report.comparison import comparison
from longspan.inspection.report.data import RunData, several
from longspan.json_text import to_json
from longspan.version import VERSION

LIBRARIES = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js")
SHARED = ("charts.js", "curves.js", "spans.js", "player.js")
PAGE_FILES = (*SHARED, "tokens.js", "sections.html", "page.css")  # the page of `longspan serve` has them too


def write_report(
    folders: Sequence[Path], path: Path, *, reload_seconds: float | None = None
) -> list[RunData]:
    """Write the page of these runs to `path`, as a whole; return what it shows."""
    runs = several(folders)
    page = report_page(runs, reload_seconds=reload_seconds)
    with whole_file(path) as partial:
        partial.write_text(page, encoding="utf-8")
    return runs


def report_page(runs: Sequence[RunData], *, reload_seconds: float | None = None) -> str:
    """The HTML of these runs; with `reload_seconds` the page loads itself again."""
    title = ", ".join(run["name"] for run in runs)
    body = Template(asset("report.html")).substitute(
        title=html.escape(title),
        made=html.escape(f"longspan {VERSION}, {datetime.now():%Y-%m-%d %H:%M:%S}"),
        summary=_summary(runs),
        differences=_differences(runs),
        sections=asset("sections.html").rstrip(),
        environment=_environment(runs),
        configuration=_configuration(runs),
    )
    data = {"runs": [_drawn(run) for run in runs], "reload_seconds": reload_seconds}
    return whole_page(title, body, data, [*SHARED, "report.js"], LIBRARIES)


def whole_page(
    title: str, body: str, data: object, scripts: Sequence[str], libraries: Sequence[str] = ()
) -> str:
    """A page of these assets; its scripts read `data` from the element `data`."""
    codes = [asset(f"vendor/{name}") for name in libraries] + [asset(name) for name in scripts]
    hashes = " ".join(f"'sha256-{_hash(code)}'" for code in codes)
    style = f"\n{asset('page.css')}"
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'sha256-{_hash(style)}'; img-src data: blob:"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{html.escape(title)} · longspan</title>",
            f"<style>{style}</style>",
            "</head>",
            f"<body>\n{body}",
            f'<script type="application/json" id="data">{script_json(data)}</script>',
            *(f"<script>{code}</script>" for code in codes),
            "</body>",
            "</html>\n",
        ]
    )


def script_json(value: object) -> str:
    """JSON that cannot end the script element it is in."""
    return to_json(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(name: str) -> str:
    """The text of a file of this package."""
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


@cache
def _hash(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def table(header: Iterable[str], rows: Iterable[Iterable[str]], *, name: str) -> str:
    """An HTML table of plain text; the first column names the row."""
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{html.escape(first)}</th>{cells}</tr>')
    body = "\n".join(lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(name)}"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _drawn(run: RunData) -> RunData:
    """What the scripts need."""
    names = ("name", "folder", "curves", "spans", "ramp", "search", "samples")
    return {name: run[name] for name in names}


def _summary(runs: Sequence[RunData]) -> str:
    header = ("run", "progress", "tokens", "training time", "score on valid", "score on test")
    rows = [
        (
            f"{run['name']} ({run['folder']})",
            _progress(run),
            f"{run['tokens']:,.0f}",
            _duration(run["seconds"]),
            *(_score(run, split) for split in ("valid", "test")),
        )
        for run in runs
    ]
    notes = [
        f"<p>{count:,} damaged lines of {html.escape(run['folder'])}/{html.escape(file)} are left out.</p>"
        for run in runs
        for file, count in run["damaged"].items()
    ]
    return "\n".join([table(header, rows, name="Summary"), *notes])


def _progress(run: RunData) -> str:
    if run["finished"]:
        return f"finished, {run['step']:,} steps"
    return f"step {run['step']:,}" + (f" of {run['steps']:,}" if run["steps"] else "") + ", not finished"


def _score(run: RunData, split: str) -> str:
    score = (run["score"] or {}).get(split, {})
    for name in ("bits_per_byte", "bits_per_token", "loss"):
        if name in score:
            return f"{score[name]:.4f} {name.replace('_', ' ')}"
    return "–"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{seconds / 60:.1f} min"


def _differences(runs: Sequence[RunData]) -> str:
    if len(runs) < 2:
        return ""
    rows = comparison(runs)
    header = ("", *(run["name"] for run in runs))
    return (
        '<section id="differences"><h2>Differences</h2>\n'
        "<p>Options that are not the same in all runs, and the scores.</p>\n"
        f"{table(header, rows, name='Differences')}</section>"
    )


def _environment(runs: Sequence[RunData]) -> str:
    names = sorted({name for run in runs for name in run["environment"]})
    header = ("", *(run["name"] for run in runs))
    rows = [(name, *(run["environment"].get(name, "–") for run in runs)) for name in names]
    return table(header, rows, name="Environment")


def _configuration(runs: Sequence[RunData]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run["config"]))
    header = ("option", *(run["name"] for run in runs))
    rows = [(name, *(run["config"].get(name, "–") for run in runs)) for name in names]
    return table(header, rows, name="Configuration")
