"""What an action warns of."""

import warnings
from collections.abc import Callable
from typing import Any

import kvlingo_mlx as kv


def told(action: Callable[[], Any]) -> list[str]:
    """The texts of the warnings of an action, all of which are this package's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert all(w.category is kv.KVLingoWarning for w in caught)
    return [str(w.message) for w in caught]
