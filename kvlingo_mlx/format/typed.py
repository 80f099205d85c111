"""JSON of strangers as dataclasses: every value is of the type that its field declares."""

from __future__ import annotations

import functools
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
    type, a dataclass of such fields, or ``Annotated`` with the range or the tuple of its values. A
    field with a default may be missing, unless its metadata are ``WRITTEN``, and is never null.

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
        found = _of_type(base, value, place)
        if found in allowed:
            return found
        if isinstance(allowed, range):
            return _refuse(value, place, f"{allowed[0]} to {allowed[-1]}")
        return _refuse(value, place, f"one of {', '.join(allowed)}")
    if origin is tuple:
        entries = enumerate(_of_type(list, value, place))
        return tuple(read(args[0], each, f"{place}[{n}]") for n, each in entries)
    if origin is Mapping:
        entries = _of_type(dict, value, place).items()
        return {key: read(args[1], each, f"{place}.{key}") for key, each in entries}
    return value if kind is Any else _of_type(kind, value, place)


def _object(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    start, known, hints = (
        f"{place} " if place else "",
        {f.name: f for f in fields(kind)},
        _hints(kind),
    )
    for name, field in known.items():
        if name not in value and not _may_lack(field):
            raise ValueError(f"{start}lacks the key {name!r}")
    parts = {}
    for name, found in value.items():
        if name not in known:
            raise ValueError(f"{start}has the unknown key {name!r:.60}")
        hint = _without_none(hints[name]) if _may_lack(known[name]) else hints[name]
        parts[name] = read(hint, found, f"{place}.{name}" if place else name)
    return kind(**parts)


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
