"""JSON of strangers as dataclasses: every value is of the type that its field declares."""

import functools
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from kvlingo_mlx.format.files import short

WRITTEN = {"written": True}  # the metadata of a field that has a default, and is always in a file
NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false",
         list: "a list", dict: "an object"}  # fmt: skip


def read(kind: Any, value: Any, place: str = "") -> Any:
    """A value of parsed JSON as ``kind``.

    That is a type of ``NAMES``, a ``Literal``, one of these or None, a tuple or a mapping of one
    type, a dataclass of such fields, or ``Annotated``: a number with its range, a string with its
    values or a pattern, a mapping with its keys. A field with a default may be missing, unless its
    metadata are ``WRITTEN``, and is never null. A dataclass with ``EXTRA`` ignores other keys.

    Raises:
        ValueError: The message says where, what was found and what was expected.
    """
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _object(kind, _of_type(dict, value, place), place)
    if origin in (Union, UnionType):
        return None if value is None else read(_without_none(kind), value, place)
    if origin in (Annotated, Literal):
        base, allowed = args if origin is Annotated else (str, args)
        if get_origin(base) is Mapping:
            _check_keys(_of_type(dict, value, place), allowed, allowed, place)
            return read(base, value, place)
        return _allowed(_of_type(base, value, place), allowed, place)
    if origin is tuple:
        entries = enumerate(_of_type(list, value, place))
        return tuple(read(args[0], each, f"{place}[{n}]") for n, each in entries)
    if origin is Mapping:
        entries = _of_type(dict, value, place).items()
        return {key: read(args[1], each, f"{place}.{key}") for key, each in entries}
    return value if kind is Any else _of_type(kind, value, place)


def _allowed(value: Any, allowed: Any, place: str) -> Any:
    if isinstance(allowed, re.Pattern):
        fits = allowed.fullmatch(value) is not None
        return value if fits else _refuse(value, place, f"a string of {allowed.pattern}")
    if value in allowed:
        return value
    some = isinstance(allowed, range)
    words = f"{allowed[0]} to {allowed[-1]}" if some else f"one of {', '.join(allowed)}"
    return _refuse(value, place, words)


def _object(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    known, hints = {f.name: f for f in fields(kind)}, _hints(kind)
    needed = [name for name, field in known.items() if not _may_lack(field)]
    if getattr(kind, "EXTRA", False):
        value = {name: found for name, found in value.items() if name in known}
    _check_keys(value, known, needed, place)
    parts = {}
    for name, found in value.items():
        hint = _without_none(hints[name]) if _may_lack(known[name]) else hints[name]
        parts[name] = read(hint, found, f"{place}.{name}" if place else name)
    return kind(**parts)


def _check_keys(found: Mapping[str, Any], known: Any, needed: Any, place: str) -> None:
    start = f"{place} " if place else ""
    for name in needed:
        if name not in found:
            raise ValueError(f"{start}lacks the key {name!r}")
    for name in found:
        if name not in known:
            raise ValueError(f"{start}has the unknown key {name!r:.60}")


def _may_lack(field: Field) -> bool:
    return field.default is not MISSING and field.metadata != WRITTEN


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _without_none(hint: Any) -> Any:
    optional = get_origin(hint) in (Union, UnionType)
    return next(kind for kind in get_args(hint) if kind is not NoneType) if optional else hint


def _of_type(kind: Any, value: Any, place: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind else _refuse(value, place, NAMES[kind])


def _refuse(value: Any, place: str, expected: str) -> Any:
    raise ValueError(f"{place or 'it'} is {short(value)}, expected {expected}")
