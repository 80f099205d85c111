"""A server of two models of the zoo, which several modules ask."""

from collections.abc import Iterator

import pytest

from kvlingo_mlx.embedded import zoo
from tests.support.served import ZOO, Server, served


@pytest.fixture(scope="session")
def zoo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The verb with real models."""
    models = {name: zoo(folder) for name, folder in ZOO.items()}
    with served(tmp_path_factory.mktemp("server"), models) as found:
        yield found
