"""What the pages name exists: files, headings, verbs, options, names of the package."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import command_line
from kvlingo_mlx.cli.config import is_key, key_of
from tests.docs.doc_pages import (
    PAGES,
    ROOT,
    anchors,
    blocks,
    inline_code,
    links,
    mentioned,
    words_of,
)
from tests.support.command_line import COMMANDS
from tests.support.translator_folders import Layout, config_json, layer_json
from tools import render_help

HOUSE = ROOT / "ARCHITECTURE.md"
LOG = ROOT / "benchmarks" / "paper" / "LOG.md"
LINKED = [*PAGES, ROOT / "SECURITY.md", HOUSE, LOG]
DECISIONS = ROOT / "docs" / "decisions"
OURS = command_line.commands  # type: ignore[attr-defined]
EVERYWHERE = {"--help", "-h", "--version", "-V", "--debug", "--install-completion"}
FOLDERS = "kvlingo_mlx tests benchmarks tools docs examples .github .ci".split()
# Options of other programs that a page's prose may name.
OTHERS = {"--nproc-per-node"}


def options_of(verb: str) -> set[str]:
    """Every option of a verb, without the flags that are keys now."""
    shown = (p for p in COMMANDS[verb].params if not is_key(p))
    spelt = (o for p in shown for o in (*p.opts, *p.secondary_opts))
    passed = {"--model", "--port"} if COMMANDS[verb].callback.options.PASSES_ON else set()
    return {o for o in spelt if o.startswith("-")} | EVERYWHERE | passed


ALL_OPTIONS = EVERYWHERE.union(*map(options_of, COMMANDS)) | OTHERS


def faults_of_command(words: list[str]) -> list[str]:
    """What is wrong with a command of ours: its verb, its options."""
    options = [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    if not words or words[0].startswith("-"):
        return [option for option in options if option not in EVERYWHERE]
    verb = words[0]
    if verb in ("VERB", "help"):
        return []
    if verb not in COMMANDS:
        return [verb]
    wrong = [f"{verb} {option}" for option in options if option not in options_of(verb)]
    keys = {key_of(p) for p in COMMANDS[verb].params}
    for flag, value in itertools.pairwise(words):
        if flag in ("-c", "--config") and "=" in value and value.split("=")[0] not in keys:
            wrong.append(f"{verb} {value}")
    return wrong


def faults_of_code(code: str) -> list[str]:
    """What is wrong with inline code that names options without the program."""
    words = words_of(code)
    if not words:
        return []
    if words[0] in COMMANDS and any(word.startswith("--") for word in words):
        return faults_of_command(words)
    if words[0].startswith("--"):
        options = [w.split("=")[0] for w in words if w.startswith("--")]
        return [option for option in options if option not in ALL_OPTIONS]
    return []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_verb_and_option_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = [fault for words in mentioned(text) for fault in faults_of_command(words)]
    wrong += [fault for code in inline_code(text) for fault in faults_of_code(code)]
    if page.name == "CHANGELOG.md":  # what were flags when it was written
        flags = {
            o for c in COMMANDS.values() for p in c.params for o in (*p.opts, *p.secondary_opts)
        }
        wrong = [fault for fault in wrong if fault.split()[-1] not in flags]
    assert not wrong


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not [link for link in links(text) if not leads(page, link)]


def leads(page: Path, link: str) -> bool:
    """Whether a link's file and heading are there; the world outside is not asked."""
    if re.match(r"[a-z]+:", link):
        return link.startswith("https://")
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or anchor in anchors(target.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_in_code_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = [code for code in inline_code(text) if is_path(code) and not list(found(code))]
    assert not wrong


def is_path(code: str) -> bool:
    """Whether inline code is a path of the repository; with <...> it is a pattern for writers."""
    return code.split("/")[0] in FOLDERS and "/" in code and not re.search(r"[<> ]", code)


def found(code: str) -> list[Path]:
    """The files of a path, which may hold a star."""
    return list(ROOT.glob(code.rstrip("/").split("::")[0]))


def test_every_public_name_has_a_row_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    named = {code.split("(")[0].removeprefix("kv.") for code in inline_code(text)}
    assert not [name for name in kv.__all__ if name not in named]


def test_the_page_of_the_command_line_is_what_help_says() -> None:
    page = render_help.PAGE.read_text(encoding="utf-8")
    assert page == render_help.page(), "run `python tools/render_help.py`"
    assert not [verb for verb in OURS if verb not in anchors(page)]


def test_the_page_of_the_format_is_right() -> None:
    """It has every key of a config, and its code gives the package's fingerprints.

    That every kind of its translators is read as it says, tests/format and tests/translators show.
    """
    page = (ROOT / "docs" / "reference" / "translator-format.md").read_text(encoding="utf-8")
    config = config_json(Layout(head_mixing=False, heads=(3, 2), head_map=(2, 0)))
    for key in {*config, *config["source"], *config["source"]["layers"][0]}:
        assert f"`{key}`" in page
    session: dict = {}
    exec(next(b.text for b in blocks(page) if "def canonical" in b.text), session)
    model = kv.load("tiny-qwen3-s")
    fingerprint = session["tokenizer_fingerprint"](model.tokenizer.get_vocab())
    assert fingerprint == model.tokenizer_fingerprint
    heads, dim = model.config["num_key_value_heads"], model.config["head_dim"]
    layers = [layer_json(i, heads, dim, dim) for i in range(4)]
    rope = {"type": "default", "base": 10000.0, "dims": 32, "traditional": False, "scaling": []}
    found = session["geometry_fingerprint"]("qwen3", layers, [rope] * 4, 1e-06, 1024)
    assert found == model.geometry.fingerprint
    modules = dict(model.model.named_modules())
    norms = {n: np.array(m.weight) for n, m in modules.items() if type(m).__name__ == "RMSNorm"}
    assert session["norms_fingerprint"](norms) == model.norms_fingerprint


def test_every_page_links_the_glossary() -> None:
    """Which has few entries, each a sentence."""
    glossary = ROOT / "docs" / "glossary.md"
    pages = {*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"} - decisions() - {glossary}
    for page in pages:
        ends = {(page.parent / link).resolve() for link in links(page.read_text("utf-8"))}
        assert glossary in ends, page
    entries = re.findall(r"^\| (?!word|-)(.+?) \| (.+) \|$", glossary.read_text("utf-8"), re.M)
    assert 10 < len(entries) <= 25
    assert not [text for _, text in entries if text.count(". ") or not text.endswith(".")]


def decisions() -> set[Path]:
    """The pages of decisions, which have an index of their own."""
    return set(DECISIONS.glob("[0-9]*.md"))


def listed(contents: Path) -> set[Path]:
    found = links(contents.read_text(encoding="utf-8"))
    return {(contents.parent / link.split("#")[0]).resolve() for link in found}


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = ROOT / "docs" / "README.md"
    pages = set((ROOT / "docs").rglob("*.md")) - {contents} - decisions()
    assert pages <= listed(contents)
    assert decisions() <= listed(DECISIONS / "index.md")


def test_the_papers_of_the_house_are_short() -> None:
    """Somebody who joins reads them in an hour."""
    assert len(HOUSE.read_text("utf-8").split()) <= 1500
    assert all(len(page.read_text("utf-8").split()) <= 300 for page in decisions())
    lessons = LOG.read_text("utf-8").split("\n# What was tried\n")[0]
    assert 100 < len(lessons.split()) <= 600


@pytest.mark.parametrize("page", [HOUSE, *sorted(decisions())], ids=lambda page: page.stem)
def test_what_the_papers_of_the_house_place_is_there(page: Path) -> None:
    """A room is a folder of the package, `room/file` a file or a folder in it."""
    package = ROOT / "kvlingo_mlx"
    rooms = {path.name for path in package.iterdir() if path.is_dir()}
    text = page.read_text("utf-8")
    pictures = "".join(block.text for block in blocks(text) if block.language == "text")
    codes = [*inline_code(text), *re.findall(r"[a-z_]+/[a-z_]*", pictures)]
    named = {code.rstrip("/") for code in codes if "/" in code and code.split("/")[0] in rooms}
    placed = {code: package / code.split(".")[0] for code in named}
    assert not [
        c for c, path in placed.items() if not (path.is_dir() or path.with_suffix(".py").is_file())
    ]


def test_no_page_names_a_machine() -> None:
    """Neither a folder of somebody's machine, nor the address of a package index or of a host.

    127.0.0.1 is everybody's own, where servers listen.
    """
    private = re.compile(
        r"/(?:home|root|work|Users|tmp)/\w|\b(?!127\.)\d+\.\d+\.\d+\.\d+\b|pypi\.org|index-url"
    )
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in [*PAGES, *(ROOT / "examples").glob("*.py"), *(ROOT / ".github").rglob("*.yml")]
        for match in private.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_docstrings_cite_the_paper_by_title() -> None:
    """Readers of the paper's page see titles and equations, and no numbers of sections."""
    numbered = re.compile(r"(?i)\bsection \d|\bappendix [A-Z]\b")
    files = [
        p for d in ("kvlingo_mlx", "benchmarks/paper") for p in sorted((ROOT / d).rglob("*.py"))
    ]
    assert not [file.name for file in files if numbered.search(file.read_text(encoding="utf-8"))]


def test_what_is_not_there_is_noticed() -> None:
    page = ROOT / "README.md"
    assert not leads(page, "docs/nowhere.md") and not leads(page, "docs/README.md#nothing")
    assert not leads(page, "../../etc/passwd") and not leads(page, "http://example.com")
    assert leads(page, "docs/README.md") and leads(page, "https://arxiv.org/")
    assert faults_of_command(["generte", "--prompt", "x"]) == ["generte"]
    assert faults_of_command(["generate", "--promt", "x"]) == ["generate --promt"]
    assert faults_of_code("fit --no-such 3") == ["fit --no-such"]
    assert faults_of_code("--no-such-option") == ["--no-such-option"]
    assert faults_of_command(["generate", "-c", "heel=idle"]) == ["generate heel=idle"]
    assert faults_of_command(["generate", "--heal", "idle"]) == ["generate --heal"]
    assert not faults_of_command(["generate", "A", "B", "-c", "heal=interleaved"])
    assert not faults_of_command(["generate", "-p", "hi", "--max-tokens=3"])
    assert is_path("kvlingo_mlx/nothing.py") and not found("kvlingo_mlx/nothing.py")
    (block,) = blocks("```console\n$ kvlingo-mlx show x\noutput\n```\n")
    assert block.commands == ["kvlingo-mlx show x"]


def test_the_version_follows_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\](?: - (\S+))?$", text, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    newest, date = headings[1]
    assert kv.__version__ == newest
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    numbers = [tuple(map(int, version.split("."))) for version, _ in headings[1:]]
    assert numbers == sorted(numbers, reverse=True)


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    files = [*PAGES, *(ROOT / ".github").rglob("*.yml")]
    named = {n for f in files for n in re.findall(r"(?:^|`|run: )make (\w+)", f.read_text(), re.M)}
    assert {"demo", "test"} <= named <= targets


def test_workflows_are_sound() -> None:
    yaml = pytest.importorskip("yaml")
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        for job in jobs.values():
            assert {needed for needed in [job.get("needs")] if needed} <= set(jobs)
            used = [step["uses"] for step in job.get("steps", ()) if "uses" in step]
            assert all(re.fullmatch(r"[\w-]+/[\w-]+@[\w/.]+", name) for name in used)
            scripts = re.findall(r"python (\w+/\S+\.py)", str(job))
            assert all((ROOT / script).exists() for script in scripts)
            if "uses" in job:
                assert (ROOT / job["uses"]).exists()


def test_the_release_check_refuses_another_tag() -> None:
    """What the release workflow runs before it builds."""
    command = [sys.executable, str(ROOT / "tools" / "check_release.py")]
    right = subprocess.run([*command, f"v{kv.__version__}"], capture_output=True, text=True)
    assert right.returncode == 0, right.stderr
    wrong = subprocess.run([*command, "v99.0.0"], capture_output=True, text=True)
    assert wrong.returncode == 1 and "99.0.0" in wrong.stderr
