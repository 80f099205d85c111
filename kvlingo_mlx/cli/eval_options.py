"""The options of ``kvlingo-mlx eval``, and the reading of their values."""

import difflib
import json
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from kvlingo_mlx.cli.command import COUNTS, Configured, words
from kvlingo_mlx.options import COUNT, LAYERS, NATIVE_LAYERS, Kind, Need, option

ITEMS = 64
OWN = ("continuation", "recall", "needles")


def asks(*names: str) -> Any:
    """A function that tells whether one of these is among the words of an option."""
    return lambda tasks: any(name in names for name in words(tasks))


def public(tasks: str) -> bool:
    """Whether lm-eval runs one of the tasks."""
    return any(name not in OWN for name in words(tasks))


def written(tasks: str) -> bool:
    """Whether a model writes the answers of one of the tasks."""
    return asks("needles")(tasks) or public(tasks)


def drawn(data: str | None, tasks: str) -> bool:
    """Whether some item is generated or chosen at random."""
    return data is None or words(tasks) != ["continuation"]


def split_tasks(names: list[str]) -> tuple[list[str], list[str]]:
    """Our own tasks, and the tasks that lm-eval runs.

    Raises:
        ValueError: No task is given, or a name looks misspelt.
    """
    if not names:
        raise ValueError(f"--tasks is empty; known are {', '.join(OWN)}, and lm-eval's")
    others = [name for name in names if name not in OWN]
    for name in others:
        if close := difflib.get_close_matches(name, OWN, 1, 0.8):
            raise ValueError(f"--tasks names {name!r}; did you mean {close[0]}?")
    return [name for name in names if name in OWN], others


def named_files(texts: list[str] | None) -> dict[str, str]:
    """Files by name, from NAME=FILE."""
    return dict(text.split("=", 1) for text in texts or [])  # type: ignore[misc]


FILES = Kind(
    lambda texts: all(re.fullmatch(r"[^=]+=.+", text) for text in texts),
    "NAME=FILE, such as quac=quac.jsonl",
)
OBJECT = Kind(
    lambda value: isinstance(value, dict), 'a JSON object: {"max_seq_lengths": [4096]}', json.loads
)
FORMS = Kind(lambda text: set() < {*words(text)} <= {"8", "4"}, "8, 4 or 8,4")


@dataclass(frozen=True, kw_only=True)
class EvalFields(Configured):
    """All options; what they need of one another is :class:`EvalOptions`'."""

    translators: list[str] | None = option(
        None, "Translators: FOLDER, NAME=FOLDER, or NAME=A,B,C (seeds); else the store's.",
        word=True,
    )  # fmt: skip
    source: str
    target: str
    quantize: str | None = option(
        None, "Also compare each translator with its weights in 8 or 4 bits: 8,4.", kind=FORMS
    )
    native_layers: int | str | None = option(None, NATIVE_LAYERS, kind=LAYERS)
    tasks: str = option(
        "continuation,recall", "continuation, recall, needles, and any that lm-eval has."
    )
    baselines: str = option("hidden,shuffled", "hidden, shuffled, text; or none.")
    data: str | None = option(None, "JSONL for continuation; default: generated dialogues.")
    limit: int | None = option(
        None, "Items a task; of needles, a variant and length; default: 64.", kind=COUNT
    )
    seed: int = option(0, "Seed of what is generated.")
    needles: str = option("single,multi-key,multi-value,multi-query", "Variants of needles.")
    lengths: list[int] | None = option(
        None, "Lengths of haystacks in tokens: 4096,8192.", kind=COUNTS
    )
    style: str = option("magic", "Needles: magic numbers, or facts (the zoo's).")
    haystack: str | None = option(None, "A text file to hide the needles in.")
    max_tokens: int | None = option(
        None, "Longest answer; default: 128, or as lm-eval's task has it.", "--max-tokens", "-m",
        kind=COUNT,
    )  # fmt: skip
    thinking: bool = False
    batch_size: int = option(
        8, "lm-eval: answers that are written at once; fewer while memory is short.", kind=COUNT
    )
    num_shots: int | None = option(None, "lm-eval: examples shown; default: the task's own.")
    chat: bool | None = option(
        None,
        "lm-eval: prompts as chats; default: if the target has a template.",
        "--apply-chat-template/--no-apply-chat-template",
    )
    include_path: str | None = option(None, "lm-eval: a folder of further task files.")
    task_data: list[str] | None = option(
        None, "NAME=FILE: local records for a task; NAME=FOLDER: a file for each split.", kind=FILES
    )
    metadata: dict[str, Any] | None = option(
        None, 'lm-eval: JSON for tasks that ask: {"key": ...}.', kind=OBJECT
    )
    unsafe_code: bool = option(
        False, "lm-eval: allow tasks that run generated code.", "--confirm-run-unsafe-code"
    )
    out: str = option("kvlingo-eval.jsonl", "Items' scores; the same command resumes.")
    allow_mismatch: bool = False

    @property
    def count(self) -> int:
        """The items of a task that is asked for by name."""
        return ITEMS if self.limit is None else self.limit

    @property
    def responses(self) -> str:
        """The file for lm-eval's responses, which are long."""
        return f"{self.out.removesuffix('.jsonl')}.responses.jsonl"

    @property
    def named_baselines(self) -> list[str]:
        """The names of ``--baselines``."""
        return [name for name in words(self.baselines) if name != "none"]

    @property
    def forms(self) -> list[int | None]:
        """The forms in which each translator is compared: unchanged, and in so many bits."""
        return [None, *map(int, words(self.quantize or ""))]


def _local(files: list[str] | None, tasks: str) -> bool:
    """Whether every NAME=FILE names one of the tasks."""
    return all(text.partition("=")[0] in words(tasks) for text in files or [])


@dataclass(frozen=True, kw_only=True)
class EvalOptions(EvalFields):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("data", "tasks", asks("continuation"), "continuation"),
        Need("needles lengths style haystack", "tasks", asks("needles"), "needles"),
        Need("max_tokens thinking", "tasks", written, "needles", "whose tasks write no answer"),
        Need("batch_size num_shots chat include_path metadata unsafe_code", "tasks", public,
             "gsm8k", "which lm-eval does not run"),
        Need("task_data", "task_data tasks", _local,
             told="where it names no task of --tasks; name it there, or leave the file out"),
        Need("seed", "data tasks", drawn, why="since the file's records are read in order"),
    )  # fmt: skip
    KEYS: ClassVar[str] = (
        "style haystack num_shots chat include_path task_data metadata unsafe_code"
    )


def named_translators(translators: list[str] | None) -> dict[str, list[str | None]]:
    """The translators by name: NAME= before them, else their last part, else "translated"."""
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


def haystack_text(path: str | None) -> str | None:
    """The text that hides the needles; None if it is generated."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"haystack {path} cannot be read ({error})") from None
    if not text.strip():
        raise ValueError(f"haystack {path} is empty; give a text, or none for generated prose")
    return text
