"""A server of two models of the zoo, which several modules ask."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kvlingo_mlx.embedded import zoo

if TYPE_CHECKING:
    from tests.support.served import Server


@pytest.fixture(scope="session")
def zoo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The verb with real models; skipped where the extras of tests are not installed."""
    for needed in ("starlette", "httpx", "openai"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    from tests.support.served import ZOO, served

    models = {name: zoo(folder) for name, folder in ZOO.items()}
    with served(tmp_path_factory.mktemp("server"), models) as found:
        yield found
