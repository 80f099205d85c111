"""A target through which no gradient flows is refused by name, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import pytest

pytest.importorskip("torch")

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.reclassed import calling
from kvlingo_mlx.training import trainer
from tests.support.trainings import training


def without_gradient(x: mx.array) -> mx.array:
    """An operation of MLX that has no gradient, with its input unchanged."""
    return x + 0 * mx.linalg.qr(x[0, :2, :2].astype(mx.float32), stream=mx.cpu)[0][0, 0]


@pytest.mark.parametrize(
    ("act", "reason"),
    [(without_gradient, "QR"), (mx.stop_gradient, "of all keys is 0")],
    ids=["no vjp", "zeros"],
)
def test_it_is_refused(
    models: dict[str, LanguageModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Any,
    reason: str,
) -> None:
    target = models["wide"]

    def change(call: Any) -> Any:
        return lambda *args, **kwargs: act(call(*args, **kwargs))

    monkeypatch.setattr(trainer.Trainer, "_first", None)  # no work is begun
    with (
        calling([target.model.layers[-1]], change),
        pytest.raises(UnsupportedModelError, match=reason) as found,
    ):
        training(models, tmp_path / "t", pair=("dense", "wide")).run()
    assert target.name in str(found.value) and "--steps 0" in str(found.value)
    assert "\n" not in str(found.value)
    assert not list(tmp_path.iterdir())


def test_a_closed_form_needs_none(models: dict[str, LanguageModel], tmp_path: Path) -> None:
    with calling([models["wide"].model.layers[-1]], lambda call: lambda *a, **k: mx.stop_gradient(
        call(*a, **k)
    )):  # fmt: skip
        training(models, tmp_path / "t", pair=("dense", "wide"), steps=0).run()
