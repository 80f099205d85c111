"""Choose which model answers a turn, by a recipe, rules in a TOML file or a user's function."""

import importlib
import math
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvlingo_mlx.engine.transcript import Message
from kvlingo_mlx.options import read_table

# A route takes the messages, the newest last, and the models' names; it returns one of the names.
Route = Callable[[Sequence[Message], Sequence[str]], str]

# Rules that come with the package, a file of recipes/ each, and how their models are called.
RECIPES = {"plan-build": ("plan", "build")}
END = 5000  # characters of a long message's ends, in which patterns are looked for
# What a rule can ask of the user's newest message, and how many answers there must have been.
CONDITIONS: dict[str, type] = {
    "pattern": str,
    "min_characters": int,
    "max_characters": int,
    "after_turn": int,
}


def load_route(text: str, names: Sequence[str]) -> Route:
    """Load a route: a recipe, rules in ``FILE.toml``, or a callable whose code is run.

    A callable is named ``module:function`` or ``path/to/file.py:function``.

    Raises:
        ValueError: The route cannot be read or names no model. A route raises it too if its
            callable fails or returns no model's name.
    """
    if roles := RECIPES.get(text, ()):
        if not {*roles} <= {*names}:
            raise ValueError(
                f"the route {text} is for models named {' and '.join(roles)}, and there are "
                f"{', '.join(names)}; name them so: {' '.join(f'{role}=MODEL' for role in roles)}"
            )
        text = str(Path(__file__).with_name("recipes") / f"{text}.toml")
    if text.endswith(".toml"):
        return _rules(text, names)
    return _checked(_function(text), text)


def _rules(path: str, names: Sequence[str]) -> Route:
    """The route of a TOML file: the first rule that holds, or the default."""
    data = read_table(path, "the route")
    tables = data.pop("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{path}: rule is {tables!r:.80}; write each rule under [[rule]]")
    default = _entries(data, {"default": str}, "default", names, path)["default"]
    rules = []
    for number, table in enumerate(tables, start=1):
        where = f"{path}, rule {number}"
        rules.append(_entries(table, {"use": str, **CONDITIONS}, "use", names, where))
        if len(table) < 2:
            raise ValueError(f"{where}: no condition; give one or more of {', '.join(CONDITIONS)}")
        if table.get("min_characters", 0) > table.get("max_characters", math.inf):
            raise ValueError(
                f"{where}: min_characters is above max_characters; no message has both"
            )

    def route(messages: Sequence[Message], names: Sequence[str]) -> str:
        said = (m.get("content") for m in reversed(messages) if m.get("role") == "user")
        text = next(said, "")
        text = text if isinstance(text, str) else ""
        answers = sum(m.get("role") == "assistant" for m in messages)
        return next((rule["use"] for rule in rules if _holds(rule, text, answers)), default)

    return route


def _entries(
    table: dict[str, Any], known: dict[str, type], model: str, names: Sequence[str], where: str
) -> dict[str, Any]:
    """A table's entries, checked; ``model`` is the key of a model's name."""
    if table.get(model) not in names:
        found = f"is {table[model]!r:.80}" if model in table else "is missing"
        raise ValueError(f"{where}: {model} {found}; give one of {', '.join(names)}")
    for key, value in table.items():
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")
        if type(value) is not known[key] or (isinstance(value, int) and value < 0):
            what = "a whole number, 0 or more" if known[key] is int else "a text"
            raise ValueError(f"{where}: {key} is {value!r:.80}; give {what}")
    try:
        pattern = re.compile(table.get("pattern", ""), re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{where}: pattern {table['pattern']!r:.80} is no regular expression ({error})"
        ) from None
    return {**table, "pattern": pattern}


def _holds(rule: dict[str, Any], message: str, answers: int) -> bool:
    """Whether a rule applies to a new message after this number of answers."""
    fewest, most = rule.get("min_characters", 0), rule.get("max_characters", math.inf)
    # Of a long message patterns are looked for in its ends, as some take quadratic time.
    ends = (message,) if len(message) <= 2 * END else (message[:END], message[-END:])
    return (
        fewest <= len(message) <= most
        and answers >= rule.get("after_turn", 0)
        and any(map(rule["pattern"].search, ends))
    )


def _function(text: str) -> Route:
    """The callable named by ``module:function`` or ``file.py:function``."""
    home, _, name = text.rpartition(":")
    if not home or not name.isidentifier():
        raise ValueError(
            f"the route is {text!r}; give FILE.toml, module:function or path/to/file.py:function, "
            f"or a recipe: {', '.join(RECIPES)}"
        )
    try:
        if home.endswith(".py"):
            module: Any = SimpleNamespace(**runpy.run_path(home))
        else:
            module = importlib.import_module(home)
    except Exception as error:  # a user's code may raise anything; only the message is shown
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


def _checked(function: Route, text: str) -> Route:
    """The callable as a route that checks the returned name."""

    def route(messages: Sequence[Message], names: Sequence[str]) -> str:
        try:
            name = function(messages, names)
        except Exception as error:  # as above
            said = " ".join(str(error).split())
            raise ValueError(f"the route {text} failed ({type(error).__name__}: {said})") from error
        if not isinstance(name, str) or name not in names:
            raise ValueError(
                f"the route {text} chose {name!r:.80}; it must return one of {', '.join(names)}"
            )
        return name

    return route
