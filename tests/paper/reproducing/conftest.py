"""What tests of whole labels share."""

import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def indexed_once() -> Iterator[None]:
    """lm-eval's thousands of task files are indexed once, which takes many seconds each time."""
    if importlib.util.find_spec("lm_eval") is None:
        yield
        return
    import lm_eval
    from lm_eval.tasks._index import TaskIndex

    build, own = TaskIndex.build, Path(lm_eval.__file__).parent
    once = cache(lambda path: build([path]))

    def merged(paths: Sequence[Path], **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in paths:
            found |= once(path) if own in path.parents else build([path], **more)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskIndex, "build", staticmethod(merged))
        yield
