"""Which BLAS MLX computes by: opened in time, named by what the loader did, missed aloud.

The planted library is MLX's own reference BLAS under OpenBLAS's name, so none need be installed.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvlingo_mlx.backend import mx

import pytest

from kvlingo_mlx import blas
from kvlingo_mlx.cli import run
from kvlingo_mlx.errors import KVLingoWarning
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.store import diagnosis
from tests.support.fixtures import Patch, Printed

PACKED = Path(mx.__file__).parents[1] / "mlx_cpu.libs"
WARNED = "put `import kvlingo_mlx` before mlx and mlx_lm"
TELL = """
import sys
import kvlingo_mlx.backend
from kvlingo_mlx import blas
from kvlingo_mlx.reporting import measure
print(blas.in_effect())
print(measure.machine_line().count("OpenBLAS"), measure.environment()["fast_blas"])
"""

pytestmark = pytest.mark.skipif(not PACKED.is_dir(), reason="MLX's Linux CPU wheel has this BLAS")


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A fast BLAS, by its name."""
    (own,) = PACKED.glob("libblas-*.so*")
    return Path(shutil.copy(own, tmp_path / "libopenblas.so.0"))


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., tuple[list[str], str, str]]:
    """Runs code: lines that it wrote, what it warned of, and what the loader gave MLX."""

    def start(code: str, choice: str, loader: str = "") -> tuple[list[str], str, str]:
        log = tmp_path / "bindings"
        environment = {
            **os.environ, "KVLINGO_BLAS": choice, "LD_LIBRARY_PATH": str(PACKED),
            **({"LD_DEBUG": loader, "LD_DEBUG_OUTPUT": str(log)} if loader else {}),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        said = "".join(p.read_text(errors="replace") for p in tmp_path.glob("bindings.*"))
        found = re.findall(r"binding file \S*/libmlx\.so \S* to (\S+) .*`cblas_sgemm'", said)
        return done.stdout.splitlines(), done.stderr, "".join(found)

    return start


def test_it_is_open_before_mlx_whoever_imports_that(planted: Path, started: Callable) -> None:
    """The loader itself is asked as well as our own reading of what it did."""
    code = f"import kvlingo_mlx\nimport mlx_lm{TELL}"
    said, warned, bound = started(code, str(planted), "bindings")
    assert said == ["OpenBLAS", "1 OpenBLAS"] and warned == "" and bound == str(planted)


def test_who_comes_too_late_is_told_once(planted: Path, started: Callable) -> None:
    """Neither being open nor being opened first of ours makes it the one in effect."""
    code = (
        f"import mlx.core\nimport ctypes\nctypes.CDLL({str(planted)!r}, mode=ctypes.RTLD_GLOBAL)"
        f"{TELL}import kvlingo_mlx.engine.generation"
    )
    said, warned, bound = started(code, str(planted), "bindings")
    assert said == ["bundled BLAS", "0 bundled BLAS"] and PACKED.name in bound
    assert warned.count("KVLingoWarning") == 1 and warned.count(WARNED) == 1


def test_switched_off(planted: Path, started: Callable) -> None:
    said, warned, _ = started(f"import kvlingo_mlx{TELL}", "0")
    assert said == ["bundled BLAS", "0 bundled BLAS"] and warned == ""


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("/nowhere/libfast.so", "names /nowhere/libfast.so, which cannot be opened"),
        ("libm.so.6", "names libm.so.6, which has no cblas_sgemm"),
    ],
)
def test_a_choice_that_is_no_blas_is_told(monkeypatch: Patch, choice: str, words: str) -> None:
    monkeypatch.setenv("KVLINGO_BLAS", choice)
    with pytest.warns(KVLingoWarning, match=words) as told:
        blas.tell_if_missed()
    assert len(told) == 1


def test_long_verbs_alone_tell_that_there_is_no_openblas(tmp_path: Path, started: Callable) -> None:
    """Once, on standard error, before they work; what is switched off is not told."""
    code = "import kvlingo_mlx.blas as b\nb.DEFAULT = 'libabsent.so.0'\n"
    code += "from kvlingo_mlx.cli import run\nrun({})\nrun({})"
    pair = ["--source", "tiny-qwen3-s", "--target", "tiny-qwen3-l"]
    long = ["fit", *pair, "--data", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "x")]
    for arguments, choice, count in ((long, "", 1), (long, "0", 0), (["list", *pair], "", 0)):
        _, warned, _ = started(code.format(arguments, arguments), choice)
        assert warned.count(f"warning: {blas.ABSENT}") == count, warned
    assert "apt-get install libopenblas0-pthread" in blas.ABSENT and "KVLINGO_BLAS=0" in blas.ABSENT


def test_nothing_is_opened_until_mlx_is_imported(planted: Path, started: Callable) -> None:
    """PyTorch, imported after this package and without MLX, keeps its own BLAS and threads."""
    maps = "print('libopenblas.so.0' in open('/proc/self/maps').read())"
    code = f"import kvlingo_mlx.tokenization.samples\n{maps}\nimport mlx.core\n{maps}\nimport sys\n"
    code += "print(any(type(f).__name__ == '_BeforeMLX' for f in sys.meta_path))"
    assert started(code, str(planted))[0] == ["False", "True", "False"]


def test_other_systems_are_left_alone(monkeypatch: Patch) -> None:
    monkeypatch.setattr(blas.platform, "system", lambda: "Darwin")
    before = list(sys.meta_path)
    monkeypatch.delitem(sys.modules, "mlx.core")
    blas.prepare()
    assert sys.meta_path == before and blas.library() is None and blas.in_effect() is None


def test_doctor_tells_a_slow_machine(monkeypatch: Patch, capsys: Printed) -> None:
    """Slow is not wrong, and not all checks passed either."""
    monkeypatch.setattr(measure, "seconds", lambda action: 2 * 512**3 / 4e9)
    monkeypatch.setattr(blas, "missed", lambda: blas.ABSENT)
    (finding,) = diagnosis._blas()
    assert finding.value.endswith("float32 products at 4 GFLOP/s")
    monkeypatch.setattr(diagnosis, "diagnose", lambda: [finding])
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"slow: BLAS: {blas.ABSENT}" in out and out.endswith("\n1 thing is slow\n")
