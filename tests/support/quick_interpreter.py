"""Triton's interpreter with less work, for tests. Import this module after TRITON_INTERPRET is set.

At a call of a kernel the interpreter looks for the builtin functions among all members of Triton's language, and
replaces them until the call ends. It does the same at each call of a function within the kernel, where they are
replaced already. Here it looks once, and replaces them once for each kernel. Shapes of tensors are made once, types of
tuples when they are asked for, tensors of one shape are not broadcast to it, and sums of integers are not checked for
overflow. Tests of kernels take half the time.
"""

import dataclasses
import functools
import inspect
import math
import sys
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_replace_language = interpreter._patch_lang
_np_dtype_of = interpreter._get_np_dtype
_equal_types = tl.core.dtype.__eq__
_numel = functools.cache(tl.core.validate_block_shape)
_convert_float = interpreter._convert_float
_broadcast = TritonSemantic.broadcast_impl_value


def _replace_language_once(function: Any) -> Any:
    """Replace the language as a function sees it, unless the call of a kernel further out has done so."""
    if any(tl.core.is_builtin(each.load) for each in _languages(function.__module__)):
        return _replace_language(function)
    return interpreter._LangPatchScope()


@functools.cache
def _languages(module: str) -> list[Any]:
    """Return which of Triton's languages a module imports."""
    return [each for each in (tl, tl.core) if any(value is each for value in vars(sys.modules[module]).values())]


@functools.cache
def _builtins(owner: Any) -> list[str]:
    """Return the names of the builtin functions of a module or a class of the language. None is replaced yet."""
    return [name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]


def _replace_builtins(owner: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(owner, name, member, builder, scope)


_np_dtypes: dict[str, Any] = {}


def _np_dtype(of: Any) -> Any:
    name = of.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype_of(of.scalar)
    return _np_dtypes[name]


@functools.cache
def _shape_of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.core.tuple([tl.core.constexpr(size) for size in shape]), tl.core.constexpr(math.prod(shape))


def _make_tensor(self: Any, handle: Any, of: Any) -> None:
    self.handle, self.type, self.dtype = handle, of, of.scalar
    self.shape, self.numel = _shape_of_tensor(of.shape if of.is_block() else ())


def _make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    plain = type(shape) is tuple and all(type(size) is int for size in shape)
    self.element_ty, self.shape = element_ty, shape if plain else tuple(tl.core._unwrap_shape(shape))
    if not self.shape:
        raise TypeError("0d block_type is forbidden")
    self.numel = _numel(self.shape)


def _make_tuple(self: Any, values: Any, type: Any = None) -> None:
    self.values = [*values]
    if type is not None:
        self.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


def _convert(values: Any, before: Any, after: Any, rounding: Any) -> Any:
    if before == tl.bfloat16 and after == tl.float32:
        return values.astype(np.uint32) << 16
    return _convert_float(values, before, after, rounding)


def _broadcast_others(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    same = left.type.is_block() and right.type.is_block() and left.type.shape == right.type.shape
    return (left, right) if same else _broadcast(self, left, right)


def _equal(self: Any, other: Any) -> bool:
    return self is other or _equal_types(self, other)


builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
interpreter._patch_lang = _replace_language_once
interpreter._patch_builtin = _replace_builtins
interpreter._get_np_dtype = _np_dtype
interpreter._convert_float = _convert
TritonSemantic.broadcast_impl_value = _broadcast_others
tl.core.tensor.__init__ = _make_tensor
tl.core.block_type.__init__ = _make_block_type
tl.core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
tl.core.tuple.__init__ = _make_tuple
tl.core.tuple.type = functools.cached_property(lambda self: tl.core._type_for_tuple_values(self.values))
tl.core.tuple.type.__set_name__(tl.core.tuple, "type")
tl.core.dtype.__eq__ = _equal
