"""Triton's interpreter with less work, for tests. Import this module after TRITON_INTERPRET is set.

At a call of a kernel the interpreter looks for the builtin functions among all members of Triton's language, and
replaces them until the call ends. It does the same at each call of a function within the kernel, where they are
replaced already. Here it looks once, and replaces them once for each kernel: tests take a third less time.
"""

import functools
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_replace_language = interpreter._patch_lang


def _replace_language_once(function: Any) -> Any:
    """Replace the language as a function sees it, unless the call of a kernel further out has done so."""
    languages = [each for each in function.__globals__.values() if inspect.ismodule(each) and each in (tl, tl.core)]
    if any(tl.core.is_builtin(each.load) for each in languages):
        return _replace_language(function)
    return interpreter._LangPatchScope()


@functools.cache
def _builtins(owner: Any) -> list[str]:
    """Return the names of the builtin functions of a module or a class of the language. None is replaced yet."""
    return [name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]


def _replace_builtins(owner: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(owner, name, member, builder, scope)


interpreter._patch_lang = _replace_language_once
interpreter._patch_builtin = _replace_builtins
