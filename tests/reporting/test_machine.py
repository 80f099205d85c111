"""What a record says of the machine that it was made on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux alone")
def test_the_cores_that_a_process_may_use() -> None:
    """A benchmark that is held to one core of a machine has one, whatever the machine has."""
    one = min(os.sched_getaffinity(0))
    said = (
        f"import os; os.sched_setaffinity(0, {{{one}}})\n"
        "from kvlingo_mlx.reporting import measure\n"
        "print(measure.environment()['cores'], measure.machine()['cores'])"
    )
    found = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "1"]
