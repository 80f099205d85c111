"""The options of ``kvlingo-mlx eval``, and the parsing of their values."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.cli.command import (
    AllowMismatch,
    Configured,
    NativeLayers,
    Source,
    Target,
    argument,
    option,
)

ITEMS = 64
OWN = ("continuation", "recall", "needles")


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Configured):
    translators: list[str] | None = argument(
        None, "Translators: FOLDER, NAME=FOLDER, or NAME=A,B,C (seeds); else the store's."
    )
    source: Source
    target: Target
    quantize: str | None = option(
        None, "Also compare each translator with its weights in 8 or 4 bits: 8,4."
    )
    native_layers: NativeLayers = None
    compare: bool = option(False, "Also time each one's first token.", "--compare")
    tasks: str = option(
        "continuation,recall", "continuation, recall, needles, and any that lm-eval has."
    )
    baselines: str = option(
        "hidden,shuffled",
        "hidden, shuffled, canonical, text, folded; or none.",
    )
    device: str = option(
        "mlx", "Who decodes lm-eval's tasks: mlx; or PyTorch on cuda, cuda:N or cpu."
    )
    data: str | None = option(None, "JSONL for continuation; default: generated dialogues.")
    window: str | None = option(
        None, "Cut the texts of --data into windows of a prefix and a continuation: 256+64."
    )
    limit: int | None = option(None, "Items a task; of needles, a variant and length; default: 64.")
    seed: int = option(0, "Seed of what is generated.")
    needles: str = option("single,multi-key,multi-value,multi-query", "Variants of needles.")
    lengths: str | None = option(None, "Lengths of haystacks in tokens: 4096,8192.")
    style: str = option("magic", "Needles: magic numbers, or facts (the zoo's).")
    haystack: str | None = option(None, "A text file to hide the needles in.")
    max_tokens: int | None = option(
        None, "Longest answer; default: 128, or as lm-eval's task has it.", "--max-tokens", "-m"
    )
    thinking: bool = option(False, "The chat template's thinking switch.")
    batch_size: int = option(
        8, "lm-eval: answers that are written at once; fewer while memory is short."
    )
    num_shots: int | None = option(None, "lm-eval: examples shown; default: the task's own.")
    chat: bool | None = option(
        None,
        "lm-eval: prompts as chats; default: if the target has a template.",
        "--apply-chat-template/--no-apply-chat-template",
    )
    include_path: str | None = option(None, "lm-eval: a folder of further task files.")
    task_data: list[str] | None = option(
        None, "NAME=FILE: local records for a task; NAME=FOLDER: a file for each split."
    )
    metadata: str | None = option(None, 'lm-eval: JSON for tasks that ask: {"key": ...}.')
    unsafe_code: bool = option(
        False, "lm-eval: allow tasks that run generated code.", "--confirm-run-unsafe-code"
    )
    out: str = option("kvlingo-eval.jsonl", "Items' scores; the same command resumes.")
    plot: str | None = option(None, "Draw score against first-token time (with --compare).")
    allow_mismatch: AllowMismatch = False

    @property
    def count(self) -> int:
        """The items of a task that is asked for by name."""
        return ITEMS if self.limit is None else self.limit

    @property
    def responses(self) -> str:
        """The file for lm-eval's responses, which are long."""
        return f"{self.out.removesuffix('.jsonl')}.responses.jsonl"


def words(text: str) -> list[str]:
    """The parts of a list, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def split_tasks(names: list[str]) -> tuple[list[str], list[str]]:
    """Our own tasks, and the tasks that lm-eval runs.

    Raises:
        ValueError: No task is given, or a name looks misspelt.
    """
    if not names:
        raise ValueError(f"--tasks is empty; known are {', '.join(OWN)}, and lm-eval's")
    public = [name for name in names if name not in OWN]
    for name in public:
        if close := difflib.get_close_matches(name, OWN, 1, 0.8):
            raise ValueError(f"--tasks names {name!r}; did you mean {close[0]}?")
    return [name for name in names if name in OWN], public


def check_device(device: str, own: list[str], baselines: list[str]) -> None:
    """Refuse what PyTorch does not do.

    Raises:
        ValueError: There is no such device, or a task or a baseline is for MLX alone.
        MissingExtraError: PyTorch is not installed.
    """
    from kvlingo_mlx.training.command_line import checked_place, runtime_of

    if checked_place(device) == "mlx":
        return
    others = [name for name in baselines if name not in ("hidden", "shuffled", "none")]
    for where, names in (("--tasks", own), ("--baselines", others)):
        if names:
            raise ValueError(
                f"--device {device} decodes lm-eval's tasks from native and translated caches "
                f"alone; take {', '.join(names)} out of {where}, or use --device mlx"
            )
    runtime_of(device).check_device(device)


def window(text: str | None) -> tuple[int, int] | None:
    """The numbers of tokens of a prefix and of its continuation, of the key ``window``."""
    if text is None:
        return None
    numbers = [part.strip() for part in text.split("+")]
    if len(numbers) != 2 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ValueError(f"window is {text!r}; give two numbers of tokens: 256+64")
    return int(numbers[0]), int(numbers[1])


def named_files(texts: list[str] | None) -> dict[str, str]:
    """Files by name, from NAME=FILE."""
    files = {}
    for text in texts or []:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise ValueError(f"task_data is {text!r}; give NAME=FILE, such as quac=quac.jsonl")
        files[name] = file
    return files


def json_object(text: str | None) -> dict[str, Any]:
    """The object of the key ``metadata``."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f'metadata is {text!r}; give a JSON object: {{"max_seq_lengths": [4096]}}')
    return found


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


def forms(text: str | None) -> list[int | None]:
    """The forms in which each translator is compared: unchanged, and those of ``--quantize``."""
    listed = words(text or "")
    if (text is not None and not listed) or set(listed) - {"8", "4"}:
        raise ValueError(f"--quantize is {text!r}; give 8, 4 or 8,4")
    return [None, *map(int, listed)]


def lengths(text: str | None) -> list[int] | None:
    """The numbers of ``--lengths``; None without the option."""
    try:
        found = None if text is None else [int(word) for word in words(text)]
    except ValueError:
        found = []
    if found == []:
        raise ValueError(f"--lengths is {text!r}; give numbers of tokens: 1024,2048")
    return found


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
