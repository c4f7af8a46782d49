"""Imports plugins: users' modules on the Python path that register something when they are imported.

A run folder may come from an untrusted source, and its config.toml names plugins. So a module is located
before it is imported, and refused if it lies inside a run folder.
"""

from __future__ import annotations

import keyword
import sys
import traceback
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from longspan.errors import UserError

_run_folders: set[Path] = set()


def never_import_from(folder: Path) -> None:
    """Refuse to import plugins from this run folder."""
    _run_folders.update((folder.absolute(), folder.resolve()))


def import_plugin(name: str) -> None:
    """Import the module `name`; every failure is a `UserError` that names it."""
    parts = name.split(".")
    if parts[-1] == "py" or not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise UserError(
            f"'{name}' is not a valid plugin name: use the name of a module, such as my_module or "
            "my_package.my_module"
        )
    for count in range(1, len(parts) + 1):  # packages first: locating a.b imports a
        module = ".".join(parts[:count])
        spec = _found(module, name)
        _refuse_run_folders(spec, name)
        _imported(module, name, spec)


def _found(module: str, plugin: str) -> ModuleSpec:
    try:
        spec = find_spec(module)
    except (
        ValueError,
        ImportError,
    ):  # no spec, such as __main__, or the parent is not a package
        spec = None
    if spec is None:
        part = "" if module == plugin else f" (there is no module '{module}')"
        raise UserError(f"there is no plugin '{plugin}'{part}: install it, or put its folder on PYTHONPATH")
    return spec


def _refuse_run_folders(spec: ModuleSpec, plugin: str) -> None:
    places = [*(spec.submodule_search_locations or []), *([spec.origin] if spec.origin else [])]
    for place in map(Path, places):
        for folder in _run_folders:
            if place.absolute().is_relative_to(folder) or place.resolve().is_relative_to(folder):
                raise UserError(
                    f"the plugin '{plugin}' is inside the run folder {folder}, and code is never imported "
                    "from there: install it, or put its folder on PYTHONPATH"
                )


def _imported(module: str, plugin: str, spec: ModuleSpec) -> None:
    try:
        import_module(module)
    except (Exception, SystemExit) as problem:
        said = " ".join(str(problem.msg if isinstance(problem, SyntaxError) else problem).split())
        kind = type(problem).__name__
        reason = said if isinstance(problem, UserError) else f"{kind}: {said}" if said else kind
        place = _place(problem, spec.origin)
        raise UserError(f"the plugin '{plugin}' could not be imported: {reason} ({place})") from None


def _place(problem: BaseException, origin: str | None) -> str:
    """`file:line` of the innermost frame in the plugin's own file, else of the innermost frame."""
    if isinstance(problem, SyntaxError) and problem.filename:
        return f"{problem.filename}:{problem.lineno}"
    lines = [(frame.filename, frame.lineno) for frame in _frames(problem.__traceback__)]
    own = [line for line in lines if line[0] == origin]
    file, number = (own or lines or [(origin or "unknown file", None)])[-1]
    return f"{file}:{number}"


def _frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """The frames of a traceback, without those of the import system and of this file."""
    skipped = ("<frozen importlib", __file__, sys.modules["importlib"].__file__ or "importlib")
    return [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(skipped)]
