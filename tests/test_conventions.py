"""House rules that a reader should not have to check by eye."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvlingo_mlx
from kvlingo_mlx.cli import VERBS

PACKAGE = Path(kvlingo_mlx.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Lower rooms may not import higher ones; equal heights may import each other's siblings.
HEIGHT = {
    "errors": 0, "arguments": 1, "blas": 1, "misread": 1, "atomic": 1, "geometry": 1,
    "assignment": 1, "samples": 2, "norms": 1,
    "alignment": 1, "renderings": 2, "handover": 2, "cross_tokenizer": 6,
    "translator_config": 2, "tensor_file": 2, "checkpoint": 2, "closed_form": 3, "selection": 3,
    "training": 3, "backend": 2, "grading": 3, "embedded": 2, "families": 3, "states": 3, "keys": 4,
    "language_model": 4, "prompts": 5, "translators": 5, "pairing": 5, "capture": 5, "caches": 5,
    "validation": 6, "hybrid": 6, "hub": 3, "pictures": 1, "loading": 6, "importing": 7,
    "store": 7, "publishing": 7, "projections": 3, "sampling": 3, "answers": 3, "threads": 3,
    "notes": 5, "opening": 5, "memory": 6,
    "measure": 6, "profiles": 7, "transfer": 7, "generation": 7, "diagnosis": 7, "conversation": 8,
    "folding": 8, "fitting": 8, "evaluation": 8, "timing": 8, "analysis": 8, "cli": 9,
}  # fmt: skip
NO_MLX = (
    "arguments", "errors", "blas", "geometry", "assignment", "closed_form", "selection",
    "translator_config",
    "atomic", "tensor_file", "checkpoint", "embedded", "samples", "norms", "hub", "pictures",
    "training", "alignment", "grading", "publishing", "renderings", "handover", "projections",
    "misread",
)  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, *, top_level: bool = False) -> list[str]:
    """Modules that a file imports, in order; all of them or those of its top level."""
    tree = ast.parse(path.read_text())
    found = (n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom))
    nodes = tree.body if top_level else sorted(found, key=lambda node: node.lineno)
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names += [node.module or ""]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    own = room(path)
    if own == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "kvlingo_mlx" and len(parts) > 1 and parts[1] in HEIGHT:
            assert HEIGHT[parts[1]] <= HEIGHT[own], f"{own} imports {parts[1]}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_owners(path: Path) -> None:
    names = {name.split(".")[0] for name in imports(path)}
    own = room(path)
    assert own in HEIGHT or own == "__init__"
    if own != "training":
        assert "torch" not in names
    if own != "pictures":
        assert "matplotlib" not in names
    if own != "cli":
        assert not names & {"typer", "rich"}
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
    if own in NO_MLX:
        assert not names & {"mlx", "mlx_lm"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_backend_comes_before_mlx(path: Path) -> None:
    loads = [
        name
        for name in imports(path)
        if name.split(".")[0] in ("mlx", "mlx_lm") or name.startswith("kvlingo_mlx.backend")
    ]
    if loads and room(path) != "backend":
        assert loads[0] == "kvlingo_mlx.backend"


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_load_nothing_heavy_at_import(verb: str) -> None:
    file = PACKAGE / "cli" / (f"{verb}_.py" if verb in ("import", "list") else f"{verb}.py")
    heavy = {"mlx", "mlx_lm", "numpy", "rich", "transformers"}
    names = imports(file, top_level=True)
    assert not heavy & {name.split(".")[0] for name in names}
    allowed = ("kvlingo_mlx.cli", "kvlingo_mlx.errors")
    assert all(n.startswith(allowed) for n in names if n.startswith("kvlingo_mlx."))


def loaded_after(code: str) -> set[str]:
    """Top-level packages loaded in a fresh interpreter after running ``code``."""
    script = f"{code}\nimport sys; sys.stderr.write(' '.join(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


def test_import_and_help_are_light() -> None:
    heavy = {"mlx", "mlx_lm", "torch", "transformers", "numpy"}
    assert not loaded_after("import kvlingo_mlx") & heavy
    assert not loaded_after("from kvlingo_mlx.cli import run; run(['--help'])") & heavy


@pytest.mark.parametrize("benchmark", ["cuda_switch", "training_throughput"])
def test_what_runs_on_cuda_needs_no_mlx(benchmark: str) -> None:
    """Its records, too."""
    pytest.importorskip("torch")
    here = PACKAGE.parent / "benchmarks"
    code = f"import sys; sys.path.insert(0, {str(here)!r}); import {benchmark}"
    record = "from kvlingo_mlx import measure; measure.record('x', {}, {}); measure.machine_line()"
    loaded = loaded_after(f"{code}\n{record}")
    assert "torch" in loaded and not loaded & {"mlx", "mlx_lm"}


@pytest.mark.parametrize(
    ("code", "most"),
    [("import kvlingo_mlx", 40), ("from kvlingo_mlx.cli import run; run(['--help'])", 200)],
)
def test_import_and_help_load_few_modules(code: str, most: int) -> None:
    """Of anybody's, beside those of a bare interpreter: what they take to start is these."""

    def modules(script: str) -> int:
        script += "\nimport sys; sys.stderr.write(str(len(sys.modules)))"
        command = [sys.executable, "-c", script]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stderr)

    bare = modules("")
    assert bare < modules(code) < bare + most
    assert modules("import numpy") > bare + 40  # negative control


def test_backend_keeps_the_descriptor_limits() -> None:
    code = (
        "import resource as r; before = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "import kvlingo_mlx.generation\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == before, 'descriptor limits were lowered'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_resolves() -> None:
    for name in kvlingo_mlx.__all__:
        assert getattr(kvlingo_mlx, name) is not None
