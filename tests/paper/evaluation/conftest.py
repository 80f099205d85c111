"""lm-eval tasks that several tests of evaluation share."""

from pathlib import Path

import pytest

from tests.support.lm_eval_tasks import write_tiny_tasks


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One local task of each kind, and a group of two."""
    return write_tiny_tasks(tmp_path_factory.mktemp("tasks"))
