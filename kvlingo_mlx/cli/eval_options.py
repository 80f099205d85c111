"""What the options of ``kvlingo-mlx eval`` stand for."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlingo_mlx.evaluation.probes import Task
    from kvlingo_mlx.models.language_model import LanguageModel

OWN = ("continuation", "recall", "needles")
LENGTHS = (4096, 8192, 16384, 32768)


def words(text: str) -> list[str]:
    """The parts of a list, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def split_tasks(names: list[str], judge: str | None) -> tuple[list[str], list[str]]:
    """Tasks of our own, and those that lm-eval runs.

    Raises:
        ValueError: No task, a slip of the pen, or answers that nobody judges.
    """
    from kvlingo_mlx.evaluation.harness.tasks import JUDGED

    if not names:
        raise ValueError(f"--tasks is empty; known are {', '.join(OWN)}, and lm-eval's")
    public = [name for name in names if name not in OWN]
    for name in public:
        if close := difflib.get_close_matches(name, OWN, 1, 0.8):
            raise ValueError(f"--tasks names {name!r}; did you mean {close[0]}?")
        if name in JUDGED and judge is None:
            raise ValueError(f"a model judges the answers of {name}; add --judge MODEL")
    return [name for name in names if name in OWN], public


def named_files(texts: list[str] | None) -> dict[str, str]:
    """Files by name, from NAME=FILE."""
    files = {}
    for text in texts or []:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise ValueError(f"--task-data is {text!r}; give NAME=FILE, such as quac=quac.jsonl")
        files[name] = file
    return files


def json_object(text: str | None) -> dict[str, Any]:
    """What ``--metadata`` holds."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f'--metadata is {text!r}; give a JSON object: {{"max_seq_lengths": [4096]}}'
        )
    return found


def named_translators(translators: list[str] | None) -> dict[str, list[str | None]]:
    """What each argument is called: NAME= before it, else its last part, else "translated"."""
    if not translators:
        return {"translated": [None]}
    named: dict[str, list[str | None]] = {}
    for text in translators:
        name, equals, listed = text.rpartition("=")
        folders = words(listed)
        if not folders:
            raise ValueError(f"{text!r} names no translator; give FOLDER or NAME=FOLDER")
        if not equals:
            name = "translated" if len(translators) == 1 else folders[0].rstrip("/").split("/")[-1]
        if name in named or name in ("native", "shuffled", "prefix hidden", "reuse", "text"):
            raise ValueError(f"{name!r} is taken; name the translators: NAME=FOLDER")
        named[name] = list(folders)
    return named


def forms(text: str | None) -> list[int | None]:
    """The forms in which each translator is compared: as it is, and those of ``--quantize``."""
    listed = words(text or "")
    if (text is not None and not listed) or set(listed) - {"8", "4"}:
        raise ValueError(f"--quantize is {text!r}; give 8, 4 or 8,4")
    return [None, *map(int, listed)]


def haystack_text(path: str | None) -> str | None:
    """The text that needles are hidden in, if not generated."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--haystack {path} cannot be read ({error})") from None
    if not text.strip():
        raise ValueError(f"--haystack {path} is empty; give a text, or none for generated prose")
    return text


def make_task(name: str, source: LanguageModel, target: LanguageModel, **options: Any) -> Task:
    """One of our own tasks; ``options`` are the verb's."""
    from kvlingo_mlx.embedded import dialogues
    from kvlingo_mlx.evaluation import probes
    from kvlingo_mlx.tokenization.samples import other_tokenizer, read_jsonl

    limit, seed = options["limit"], options["seed"]
    context = min(source.context_length, target.context_length)
    if name == "continuation":
        if options["data"]:
            records = read_jsonl(options["data"])
        else:
            talks = dialogues.held_out(limit, seed=seed)
            records = [{"messages": talk.conversation()} for talk in talks]
        other = other_tokenizer(source.tokenizer, target.tokenizer)
        return probes.continuation(target, records, limit, context, other)
    if name == "recall":
        return probes.recall(target, limit, seed, source)
    room = context - options["max_tokens"]
    lengths = _lengths(options["lengths"], room)
    return probes.find_needles(
        target, options["variants"], lengths, limit, seed=seed, style=options["style"],
        text=options["text"], max_tokens=options["max_tokens"], thinking=options["thinking"],
        source=source,
    )  # fmt: skip


def _lengths(text: str | None, room: int) -> list[int]:
    if text is None:
        return [length for length in LENGTHS if length <= room] or [room]
    try:
        lengths = [int(word) for word in words(text)]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1 or max(lengths) > room:
        raise ValueError(
            f"--lengths is {text!r}; give numbers from 1 to {room}, which the shorter context "
            "leaves for a prompt: 1024,2048"
        )
    return lengths
