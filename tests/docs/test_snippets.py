"""Every snippet of the pages runs, in order, a page in one folder and one Python session.

Real models' names are served from a Hub cache that holds tiny ones. So what runs here is the text
that readers copy; what comes out of it is not looked at.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from textwrap import dedent

import huggingface_hub
import pytest

import kvlingo_mlx as kv
from benchmarks.paper import commands as paper
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import bundled, dialogues
from tests.docs.doc_pages import PAGES, REASONS, ROOT, RUN, Block, blocks, words_of
from tests.support.fixtures import Patch
from tests.support.ranks import launched

ZOO = ROOT / "tests" / "zoo"
# Which tiny model stands for a real one. Those of one column have translators to each other.
STAND_INS = {
    "Qwen/Qwen3-0.6B": kv.zoo("tiny-qwen3-s"),
    "Qwen/Qwen3-1.7B": kv.zoo("tiny-qwen3-l"),
    "Qwen/Qwen3-4B": kv.zoo("tiny-qwen3-s"),
    "Qwen/Qwen3-8B": kv.zoo("tiny-qwen3-s"),
    "Qwen/Qwen3-30B-A3B": kv.zoo("tiny-qwen3-moe"),
    "mistralai/Mistral-7B-Instruct-v0.3": ZOO / "models" / "tiny-mistral",
}
TWO_TOKENIZERS = ("tiny-qwen3-s--tiny-mistral", "tiny-mistral--tiny-qwen3-s")
CHATS = 4  # few, for speed: a fit warns that they are, and nothing here looks at what it is worth


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub cache as downloads would have left it."""
    cache = tmp_path_factory.mktemp("hub")
    for name, folder in STAND_INS.items():
        repository = cache / f"models--{name.replace('/', '--')}"
        commit = "0" * 40
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        for file in folder.iterdir():
            (snapshot / file.name).symlink_to(file)
    return cache


@pytest.fixture(scope="module")
def chats() -> str:
    """JSON lines of conversations, which the pages call chats.jsonl."""
    talks = dialogues.for_fitting(CHATS)
    return "".join(json.dumps({"messages": talk.conversation()}) + "\n" for talk in talks)


@pytest.fixture
def reader(hub_cache: Path, chats: str, store: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder in which somebody reads a page: it has their data, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub_cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(bundled, "COUNT", 1)  # receipts of one conversation, for speed
    store.mkdir(parents=True)
    for name in TWO_TOKENIZERS:
        (store / name).symlink_to(ZOO / "translators" / name)
    (folder := tmp_path / "reader").mkdir()
    (folder / "chats.jsonl").write_text(chats)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.filterwarnings("ignore::kvlingo_mlx.KVLingoWarning")
def test_every_block_runs(page: Path, reader: Path, monkeypatch: Patch) -> None:
    session = {"__name__": "__page__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.file is not None:
            (reader / block.file).write_text(block.text)
        elif block.reason is None and block.language in RUN:
            run_block(block, page, session, monkeypatch)


def run_block(block: Block, page: Path, session: dict, monkeypatch: Patch) -> None:
    """Run one block; what goes wrong names its line in the page."""
    if block.language == "python":
        # Blank lines before it, so that a traceback tells the page's own line.
        exec(compile("\n" * (block.line - 1) + dedent(block.text), str(page), "exec"), session)
        return
    for command in block.commands:
        with monkeypatch.context() as patch:
            status = run_command(words_of(command), patch)
        assert status == 0, f"{page.name}:{block.line}: `{command}` ended with {status}"


def run_command(words: list[str], patch: Patch) -> int:
    """Run ``kvlingo-mlx ...`` or ``python examples/...`` in this process; returns its status."""
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        patch.setenv(name, value)
    if words[0] == "kvlingo-mlx":
        return run(words[1:])
    if words[:3] == ["python", "-m", "benchmarks.paper"]:
        return paper.run(words[3:])
    if words[:2] == ["mlx.launch", "-n"]:
        verb = str(Path(sys.executable).parent / words[3])
        done = launched(int(words[2]), verb, *words[4:])
        return int("exited with code" in done.stdout + done.stderr)
    assert words[0] == "python" and words[1].startswith("examples/"), (
        f"{words[0]} is not run here: mark the block `<!-- not run: REASON -->`"
    )
    patch.setattr(sys, "argv", words[1:])
    runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    return 0


def test_every_block_says_what_it_is() -> None:
    """A fence that is not seen, or has no language, would slip past everything here."""
    known = {*RUN, "text", "json", "toml", "mermaid", "bibtex", "diff"}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = sum(line.lstrip().startswith("```") for line in text.splitlines())
        assert fences == 2 * len(blocks(text)), page.name
        for block in blocks(text):
            assert block.language in known, f"{page.name}:{block.line}: {block.language!r}"
            assert block.reason in (None, *REASONS), f"{page.name}:{block.line}: {block.reason}"


@pytest.mark.parametrize(
    "text",
    [
        "```python\nimport kvlingo_mlx as kv\nkv.no_such_name\n```\n",
        "```bash\nkvlingo-mlx show nobody/nothing\n```\n",
        "```bash\nkvlingo-mlx generate --no-such-option\n```\n",
        "```console\n$ kvlingo-mlx show nothing-here\nwhat it prints\n```\n",
        "```bash\nrm -r something\n```\n",
    ],
)
def test_a_block_that_does_not_work_is_noticed(text: str, reader: Path, monkeypatch: Patch) -> None:
    (block,) = blocks(text)
    with pytest.raises((AssertionError, AttributeError)):
        run_block(block, Path("page.md"), {}, monkeypatch)


def test_marks_and_continuations_are_understood() -> None:
    text = (
        "Text.\n\n<!-- not run: needs a GPU -->\n```bash\n# a comment\na --b \\\n    --c\n```\n"
        "<!-- file: rules.toml -->\n```toml\nx = 1\n```\n"
    )
    first, second = blocks(text)
    assert first.reason == "needs a GPU" and [words_of(c) for c in first.commands] == [
        ["a", "--b", "--c"]
    ]
    assert (second.file, second.text, second.reason) == ("rules.toml", "x = 1\n", None)


def test_the_pages_leave_the_process_as_it_was(reader: Path) -> None:
    """A snippet that changed the environment would change the pages after it."""
    before = dict(os.environ)
    (block,) = blocks("```bash\nKVLINGO_MEMORY_LIMIT=9 kvlingo-mlx show tiny-qwen3-s\n```\n")
    with pytest.MonkeyPatch.context() as patch:
        run_block(block, Path("page.md"), {}, patch)
    assert dict(os.environ) == before
