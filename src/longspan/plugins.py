"""Importing plugins: modules of users, found on the Python path, whose import registers what they add.

A run folder can come from anywhere, and its config.toml names plugins. So a name is looked up before it is
imported, and a module that lies inside a run folder is refused.
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
    """From now on no plugin is imported from this run folder."""
    _run_folders.update((folder.absolute(), folder.resolve()))


def import_plugin(name: str) -> None:
    """Import the module `name`; whatever goes wrong is a `UserError` that names it."""
    parts = name.split(".")
    if parts[-1] == "py" or not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise UserError(
            f"'{name}' is no name of a plugin: give a module, such as my_module or my_package.my_module"
        )
    for count in range(1, len(parts) + 1):  # packages first: looking for a.b imports a
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
    ):  # a module without a spec, such as __main__; a parent that is no package
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
                    f"the plugin '{plugin}' lies inside the run folder {folder}, and code is never taken "
                    "from there: install it, or put its folder on PYTHONPATH"
                )


def _imported(module: str, plugin: str, spec: ModuleSpec) -> None:
    try:
        import_module(module)
    except (Exception, SystemExit) as problem:
        said = " ".join(str(problem).split())
        kind = type(problem).__name__
        reason = said if isinstance(problem, UserError) else f"{kind}: {said}" if said else kind
        place = _place(problem, spec.origin)
        raise UserError(f"the plugin '{plugin}' could not be imported: {reason} ({place})") from None


def _place(problem: BaseException, origin: str | None) -> str:
    """`file:line` of the last line in the plugin's own file that was running, else of the last line."""
    if isinstance(problem, SyntaxError) and problem.filename:
        return f"{problem.filename}:{problem.lineno}"
    lines = [(frame.filename, frame.lineno) for frame in _frames(problem.__traceback__)]
    own = [line for line in lines if line[0] == origin]
    file, number = (own or lines or [(origin or "unknown file", None)])[-1]
    return f"{file}:{number}"


def _frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """Without those of the import system and of this file."""
    skipped = ("<frozen importlib", __file__, sys.modules["importlib"].__file__ or "importlib")
    return [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(skipped)]
