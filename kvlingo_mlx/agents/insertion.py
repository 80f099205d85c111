"""Put values into JSON and YAML files of others; what stands there, comments included, stays."""

import json
import re
from collections.abc import Mapping
from typing import Any

TEXT = r'"(?:[^"\\\n]|\\.)*"'
NOT_JSON = re.compile(rf"({TEXT})|//[^\r\n]*|/\*.*?\*/|\ufeff", re.DOTALL)  # a text aside
LAST_COMMA = re.compile(rf"({TEXT})|,(?=\s*[}}\]])")
DECODER = json.JSONDecoder()


def with_members(text: str, members: Mapping[str, Any]) -> str:
    """A JSON or JSONC object's text with more members; objects on both sides are merged.

    Raises:
        ValueError: The text is no JSON object.
    """
    text = text if text.strip() else "{}\n"
    plain = text
    for noise in (NOT_JSON, LAST_COMMA):  # blanks take its place, so that places stay right
        plain = noise.sub(lambda found: found[1] or " " * len(found[0]), plain)
    if not isinstance(json.loads(plain), dict):
        raise ValueError("it holds no JSON object")
    return _put(text, plain, plain.index("{"), members, 1)


def _put(text: str, plain: str, opens: int, members: Mapping[str, Any], depth: int) -> str:
    """The text with members in the object whose brace is at ``opens``, from the last one on."""
    unit = (re.findall(r'^([ \t]+)"', plain, re.MULTILINE) or ["  "])[0]
    line = ("\r\n" if "\r\n" in plain else "\n") + unit * depth
    written = {
        key: json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", line)
        for key, value in members.items()
    }
    found = _values(plain, opens + 1)
    for key in sorted(members.keys() & found.keys(), key=found.__getitem__, reverse=True):
        first, last = found[key]
        if isinstance(members[key], dict) and plain[first] == "{" and key != "kvlingo":  # ours
            text = _put(text, plain, first, members[key], depth + 1)
        else:
            text = text[:first] + written[key] + text[last:]
    new = [f"{line}{json.dumps(key)}: {written[key]}" for key in members if key not in found]
    at, behind = opens + 1, "," * bool(found and new)
    if new and not plain[at].isspace():
        behind += line if found else line.removesuffix(unit)
    return text[:at] + ",".join(new) + behind + text[at:]


def _values(plain: str, at: int) -> dict[str, tuple[int, int]]:
    """Where an object's values begin and end, by their keys; ``at`` is behind its brace."""

    def behind_marks(at: int) -> int:
        return len(plain) - len(plain[at:].lstrip(" \t\r\n:,"))

    found = {}
    while plain[at := behind_marks(at)] != "}":
        key, at = DECODER.raw_decode(plain, at)
        first = behind_marks(at)
        at = DECODER.raw_decode(plain, first)[1]
        found[key] = first, at
    return found


def with_lines(text: str, lines: str) -> str:
    """A YAML text with more at its end: items, or new keys (ValueError: that cannot be)."""
    import yaml

    end = "\r\n" if "\r\n" in text else "\n"
    new = text + end * bool(text and text[-1] != "\n") + lines.replace("\n", end)
    try:
        old, added = yaml.safe_load(text), yaml.safe_load(lines)
        both = [*(old or []), *added] if isinstance(added, list) else {**added, **(old or {})}
        fits = yaml.safe_load(new) == both
    except (yaml.YAMLError, TypeError):
        fits = False
    if not fits:
        raise ValueError("nothing can be put at its end")
    return new
