"""Configurations to and from plain dictionaries (TOML, JSON), strictly."""

from __future__ import annotations

import types as pytypes
import typing
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, Literal, TypeVar

_RENAMED = {"opposite_turn_below": "other_turns_below"}  # keys of former versions, in runs and recipes
T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as nested plain dictionaries."""
    return asdict(config)


def from_dict(cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """A configuration from plain dictionaries; keys of former versions are understood.

    Raises:
        ValueError: an unknown key (the known ones are listed), a value of the wrong type or a missing one.
    """
    name = where or cls.__name__
    if not isinstance(values, dict):
        raise ValueError(f"{name}: expected a table, got {values!r}")
    hints = typing.get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    now = {old: new for old, new in _RENAMED.items() if new in known and new not in values}
    values = {now.get(key, key): value for key, value in values.items()}
    if unknown := sorted(str(key) for key in set(values) - set(known)):
        raise ValueError(f"{name}: unknown key {', '.join(unknown)}; known keys: {', '.join(known)}")
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(required - set(values)):
        raise ValueError(f"{name}: missing key {', '.join(missing)}")
    return cls(**{key: _convert(hints[key], value, f"{name}.{key}") for key, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return from_dict(hint, value, where)
    if origin is Literal:
        if value in args:
            return value
        raise ValueError(f"{where}: {value!r} is not one of {', '.join(map(str, args))}")
    if origin in (typing.Union, pytypes.UnionType):
        return _convert_union(args, value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where}: expected a list, got {value!r}")
        return tuple(_convert(args[0], item, where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _as_float(value, where)
    if not isinstance(value, hint) or (hint in (int, float) and isinstance(value, bool)):
        raise ValueError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value


def _as_float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{where}: the number is too large") from None


def _convert_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    if isinstance(value, dict):
        tables = [option for option in options if is_dataclass(option)]
        fitting = [option for option in tables if set(value) <= {f.name for f in fields(option)}]
        return from_dict((fitting or tables)[0], value, where)
    for option in options:
        try:
            return _convert(option, value, where)
        except (ValueError, TypeError):
            continue
    raise ValueError(f"{where}: {value!r} fits none of {', '.join(o.__name__ for o in options)}")
