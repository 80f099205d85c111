"""Who answers a turn: rules in order, callables, and every refusal of either."""

from pathlib import Path
from typing import Any

import pytest

from kvlingo_mlx.engine.routing import Route, load_route

NAMES = ("small", "large", "coder")
RULES = """
default = "small"

[[rule]]
use = "coder"
pattern = "python|rust"

[[rule]]
use = "large"
min_characters = 10
max_characters = 20
after_turn = 1

[[rule]]
use = "coder"
after_turn = 3
"""


def rules(tmp_path: Path, text: str) -> Route:
    file = tmp_path / "route.toml"
    file.write_text(text)
    return load_route(str(file), NAMES)


def messages(new: Any, answers: int = 0) -> list[dict[str, Any]]:
    """A system message, some exchanges, and what the user says now."""
    before = [{"role": "system", "content": "python"}]
    for _ in range(answers):
        before += [{"role": "user", "content": "python"}, {"role": "assistant", "content": "rust"}]
    return [*before, {"role": "user", "content": new}]


@pytest.mark.parametrize(
    ("new", "answers", "name"),
    [
        ("hello", 0, "small"),
        ("Is PYTHON slow?", 0, "coder"),  # a pattern is found anywhere, whatever the case
        ("Is PYTHON slow?", 2, "coder"),  # the first of two rules that hold
        ("x" * 10, 0, "small"),  # one condition of three does not hold
        ("x" * 10, 1, "large"),
        ("x" * 20, 2, "large"),
        ("x" * 21, 2, "small"),
        ("x" * 21, 3, "coder"),
        ([{"type": "image"}], 0, "small"),  # no text: no characters
    ],
)
def test_the_first_rule_that_holds(tmp_path: Path, new: Any, answers: int, name: str) -> None:
    assert rules(tmp_path, RULES)(messages(new, answers), NAMES) == name


def test_what_stands_after_the_users_message_is_not_his(tmp_path: Path) -> None:
    asked = [*messages("short"), {"role": "tool", "content": "python"}]
    assert rules(tmp_path, RULES)(asked, NAMES) == "small"


RULE = 'default = "small"\n[[rule]]\nuse = "large"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "default is missing; give one of small, large, coder"),
        ('default = "huge"', "default is 'huge'; give one of small, large, coder"),
        ('default = "small"\nrules = []', "unknown key 'rules'; known are default"),
        ('default = "small"\nrule = 3', "rule is 3; write each rule under [[rule]]"),
        (RULE, "rule 1: no condition; give one or more of pattern, min_characters"),
        (f"{RULE}words = 3", "rule 1: unknown key 'words'; known are use, pattern"),
        (f'{RULE}min_characters = "3"', "min_characters is '3'; give a whole number"),
        (f"{RULE}after_turn = -1", "after_turn is -1; give a whole number, 0 or more"),
        (f"{RULE}min_characters = 3\nmax_characters = 2", "no message has both"),
        (f"{RULE}pattern = 3", "pattern is 3; give a text"),
        (f'{RULE}pattern = "(a"', "pattern '(a' is no regular expression"),
        ('default = "small"\n[[rule]]\nafter_turn = 1', "rule 1: use is missing; give one"),
        ('default = "small"\n[[rule]]\nuse = "huge"\nafter_turn = 1', "rule 1: use is 'huge'"),
        ("default = ", "is not valid TOML"),
    ],
)
def test_refused_rules(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        rules(tmp_path, text)
    said = str(refusal.value)
    assert message in said and "route.toml" in said and "\n" not in said


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent.toml cannot be read"):
        load_route(str(tmp_path / "absent.toml"), NAMES)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ValueError, match="folder.toml cannot be read"):
        load_route(str(tmp_path / "folder.toml"), NAMES)
    (tmp_path / "bytes.toml").write_bytes(b'default = "\xff"')
    with pytest.raises(ValueError, match="bytes.toml is not valid TOML"):
        load_route(str(tmp_path / "bytes.toml"), NAMES)


CODE = """
from __future__ import annotations
import dataclasses

@dataclasses.dataclass
class Seen:
    last: str = ""

def longest(messages, names):
    return max(names, key=len) if messages[-1]["content"] == "long" else names[0]

def unknown(messages, names): return "huge"
def nothing(messages, names): return None
def fails(messages, names): return {}["key of the user's own"]
number = 3
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "own_route.py"
    file.write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return file


def test_callables(code: Path) -> None:
    for home in (str(code), "own_route"):
        route = load_route(f"{home}:longest", ("a", "bbb", "cc"))
        assert route(messages("long"), ("a", "bbb", "cc")) == "bbb"
        assert route(messages("short"), ("a", "bbb", "cc")) == "a"


@pytest.mark.parametrize(("name", "found"), [("unknown", "'huge'"), ("nothing", "None")])
def test_a_callable_that_names_no_model(code: Path, name: str, found: str) -> None:
    route = load_route(f"{code}:{name}", NAMES)
    expected = f"{name} chose {found}; it must return one of small, large, coder"
    with pytest.raises(ValueError, match=expected):
        route(messages("x"), NAMES)


def test_what_a_callable_raises_is_told_as_its_fault(code: Path) -> None:
    message = "the route .*own_route.py:fails failed .KeyError: .key of the user's own"
    with pytest.raises(ValueError, match=message):
        load_route(f"{code}:fails", NAMES)(messages("x"), NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "path/to/file.py:function, or a recipe: plan-build"),
        ("own_route", "the route is 'own_route'; give"),
        ("plan-build", "for models named plan and build, and there are small, large, coder; name"),
        ("own_route:absent", "own_route has no 'absent'; name one of its functions"),
        ("own_route:number", "own_route has no callable 'number'"),
        ("no_such_module:f", "no_such_module cannot be imported (ModuleNotFoundError"),
        ("BAD:f", "cannot be imported (SyntaxError"),
        ("WORSE:f", "cannot be imported (NameError"),
    ],
)
def test_refused_callables(code: Path, tmp_path: Path, text: str, message: str) -> None:
    for word, source in (("BAD", "def f(:"), ("WORSE", "undefined")):
        (tmp_path / f"{word}.py").write_text(source)
        text = text.replace(f"{word}:", f"{tmp_path / word}.py:")
    with pytest.raises(ValueError) as refusal:
        load_route(text, NAMES)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


PLANS = r"""
Plan a small web shop.
Now let's think about the errors.
The test fails.\nWhy?
<system-reminder>\nPlan mode is active. The user indicated that they do not want you to execute yet
CRITICAL: Plan mode ACTIVE - you are in READ-ONLY phase.
Plan mode still active (see full instructions earlier in conversation).
I'm stuck.
It still doesn't compile.
That did not work, it is the same error.
"""
BUILDS = """
Implement the plan.
Your operational mode has changed from plan to build.
Explain how a plane flies.
Planets go here.
The reviewed design works: write it, with tests.

"""


@pytest.mark.parametrize(("texts", "name"), [(PLANS, "plan"), (BUILDS, "build")])
def test_the_recipe_of_two_models(texts: str, name: str) -> None:
    route = load_route("plan-build", ("build", "other", "plan"))
    asked = [line.replace("\\n", "\n") for line in texts.split("\n")[1:-1]]
    assert {line: route(messages(line, 2), ()) for line in asked} == dict.fromkeys(asked, name)
