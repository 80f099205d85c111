"""The suite in pieces, and the steps on a machine."""

import functools
import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

PLANTED = """import os, time
def test_wrong(): assert 1 + 1 == 3
def test_last(): os._exit(7) if "test_dies" in __file__ else time.sleep(60)"""


def test_what_fails_ends_or_hangs_is_named_and_steps_keep_to_their_time(tmp_path: Path) -> None:
    run = functools.partial(subprocess.run, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    why = {"hangs": "silent for 20 s", "dies": "ended with code 7"}
    for name in why:
        (tmp_path / f"test_{name}.py").write_text(PLANTED)
    suite = ["tools/suite_in_pieces.py", "2", tmp_path / "out", tmp_path, "--silence", "20"]
    out = run([sys.executable, *suite]).stdout
    assert all(re.search(f"FAILED: {w} in .*test_{n}.py::test_last\n", out) for n, w in why.items())
    assert out.count("assert (1 + 1) == 3") == 2 and "4 failures, 0 files not begun" in out
    out = run([sys.executable, "tools/machine_steps.py", "mac", "0.1", tmp_path, "--tiny"]).stdout
    assert "counts  " in out and sum(map(out.count, ("done", "stopped at", "no time left"))) == 5
