"""Choose which model answers a turn, by rules in a TOML file or by a user's function."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kvlingo_mlx.engine.transcript import Message

# A route takes the messages, the newest last, and the models' names; it returns one of the names.
Route = Callable[[Sequence[Message], Sequence[str]], str]

NUMBERS = ("min_characters", "max_characters", "after_turn")
CONDITIONS = ("pattern", *NUMBERS)
# Errors that running a user's file can raise: a missing module, a mistyped name, a missing key.
BROKEN_IMPORT = (
    ImportError,
    SyntaxError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    NameError,
    AttributeError,
    RuntimeError,
)


def load_route(text: str, names: Sequence[str]) -> Route:
    """Load a route by its name.

    Args:
        text: A file of rules, ``*.toml``; or a callable, as ``module:function`` or
            ``path/to/file.py:function``, whose code is run.
        names: The models' names.

    Raises:
        ValueError: The route cannot be read or names no model; the message says where, in one
            line. A route raises it too if its callable does not return a model's name.
    """
    if text.endswith(".toml"):
        return _rules(Path(text), names)
    return _checked(_function(text), text)


# ---- rules ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A model, and the conditions under which it answers; all of them must hold.

    Attributes:
        use: The model's name.
        pattern: A pattern to be found anywhere in the new message.
        min_characters: The fewest characters of the new message.
        max_characters: The most characters of the new message.
        after_turn: The fewest answers that must have been given before.
    """

    use: str
    pattern: re.Pattern[str] | None = None
    min_characters: int = 0
    max_characters: float = math.inf
    after_turn: int = 0

    def holds(self, message: str, answers: int) -> bool:
        """Whether the rule applies to a new message after this number of answers."""
        return (
            self.min_characters <= len(message) <= self.max_characters
            and answers >= self.after_turn
            and (self.pattern is None or self.pattern.search(message) is not None)
        )


def _rules(path: Path, names: Sequence[str]) -> Route:
    """The route of a TOML file: the first rule that holds, or the default."""
    data = _toml(path)
    _known_keys(data, ("default", "rule"), str(path))
    default = _model(data, "default", names, str(path))
    tables = data.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{path}: rule is {tables!r:.80}; write each rule under [[rule]]")
    rules = [_rule(t, names, f"{path}, rule {n}") for n, t in enumerate(tables, start=1)]

    def route(messages: Sequence[Message], names: Sequence[str]) -> str:
        message = _last_of_user(messages)
        answers = sum(m.get("role") == "assistant" for m in messages)
        return next((rule.use for rule in rules if rule.holds(message, answers)), default)

    return route


def _toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ValueError(f"the route {path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # broken TOML, or not UTF-8
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def _rule(table: dict[str, Any], names: Sequence[str], where: str) -> Rule:
    _known_keys(table, ("use", *CONDITIONS), where)
    use = _model(table, "use", names, where)
    numbers = {key: _number(table[key], key, where) for key in NUMBERS if key in table}
    if not set(CONDITIONS) & set(table):
        raise ValueError(f"{where}: no condition; give one or more of {', '.join(CONDITIONS)}")
    low, high = numbers.get("min_characters", 0), numbers.get("max_characters", math.inf)
    if low > high:
        raise ValueError(
            f"{where}: min_characters is {low} and max_characters {high}; no message has both"
        )
    pattern = _pattern(table["pattern"], where) if "pattern" in table else None
    return Rule(use, pattern, **numbers)


def _known_keys(table: dict[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")


def _model(table: dict[str, Any], key: str, names: Sequence[str], where: str) -> str:
    """The model that a key names."""
    if key not in table:
        raise ValueError(f"{where}: no {key}; give one of {', '.join(names)}")
    name = table[key]
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"{where}: {key} is {name!r:.80}; give one of {', '.join(names)}")
    return name


def _number(value: Any, key: str, where: str) -> int:
    # TOML's true is a Python bool, which is an int.
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{where}: {key} is {value!r:.80}; give a whole number, 0 or more")
    return value


def _pattern(value: Any, where: str) -> re.Pattern[str]:
    if not isinstance(value, str):
        raise ValueError(f"{where}: pattern is {value!r:.80}; give a regular expression as text")
    try:
        return re.compile(value, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{where}: pattern {value!r:.80} is no regular expression ({error})"
        ) from None


def _last_of_user(messages: Sequence[Message]) -> str:
    said = (m.get("content") for m in reversed(messages) if m.get("role") == "user")
    text = next(said, "")
    return text if isinstance(text, str) else ""


# ---- callables ------------------------------------------------------------------------------


def _function(text: str) -> Route:
    """The callable named by ``module:function`` or ``file.py:function``."""
    home, _, name = text.rpartition(":")
    if not home or not name.isidentifier():
        raise ValueError(
            f"the route is {text!r}; give FILE.toml, module:function or path/to/file.py:function"
        )
    try:
        module = _run(Path(home)) if home.endswith(".py") else importlib.import_module(home)
    except BROKEN_IMPORT as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"the route's {home} cannot be imported ({type(error).__name__}: {said:.200}); a "
            "module must be installed, a file be given as path/to/file.py:function"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        what = "has no" if found is None else "has no callable"
        raise ValueError(f"the route's {home} {what} {name!r}; name one of its functions")
    return found


def _run(path: Path) -> ModuleType:
    """Run a Python file anywhere on disk as a module."""
    name = f"kvlingo_mlx_route_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _checked(function: Route, text: str) -> Route:
    """The callable as a route that checks the returned name."""

    def route(messages: Sequence[Message], names: Sequence[str]) -> str:
        try:
            name = function(messages, names)
        except Exception as error:  # a user's code may raise anything; only the message is shown
            said = " ".join(str(error).split())
            raise ValueError(f"the route {text} failed ({type(error).__name__}: {said})") from error
        if not isinstance(name, str) or name not in names:
            raise ValueError(
                f"the route {text} chose {name!r:.80}; it must return one of {', '.join(names)}"
            )
        return name

    return route
