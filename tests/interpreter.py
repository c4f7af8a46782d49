"""Makes Triton's interpreter faster: it replaces the functions of `triton.language` once per launch.

By itself it does so again at every call of a function inside a kernel, such as `tl.sum`, although they are
replaced already. That takes a good part of the time of a small kernel.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any


def replace_once_per_launch() -> None:
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:  # Triton is for Linux
        return
    plain = interpreter._patch_lang
    modules = (language, language.core)

    def patch(fn: FunctionType) -> Any:
        seen = [module for module in modules if any(value is module for value in fn.__globals__.values())]
        if any(language.core.is_builtin(module.load) for module in seen):
            return plain(fn)
        return interpreter._LangPatchScope()  # nothing to replace, nothing to put back

    interpreter._patch_lang = patch
