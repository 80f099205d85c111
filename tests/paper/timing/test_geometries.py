"""Random models of released widths."""

import re

from kvlingo_mlx.backend import mx

import pytest

from benchmarks.paper.timing import geometries
from tests.support.command_line import run
from tests.support.fixtures import Patch, Printed


@pytest.mark.parametrize("precision", geometries.PRECISIONS)
def test_random_models(small_geometries: None, precision: str) -> None:
    made = [geometries.unmade_model("gemma-3-4b", 2, precision) for _ in range(2)]
    model, again = geometries.make(made)
    assert len(model.geometry.layers) == 2
    kinds = {type(module).__name__ for _, module in model.model.named_modules()}
    assert ("QuantizedLinear" in kinds) == precision.endswith("bit")
    assert model.cache_dtype == (mx.float32 if precision == "float32" else mx.bfloat16)
    for a, b in zip(*(m.model.layers[0].self_attn.q_proj.parameters().values()
                      for m in (model, again)), strict=True):  # fmt: skip
        assert mx.array_equal(a, b)
    for name, layers, said in (
        ("gemma-3-4b", 9, "layers is 9; gemma-3-4b has 4"),
        ("gemma-3-4b", 1, "layers is 1; of gemma-3-4b every 2th attends to all tokens"),
        ("gpt", None, "--geometry names 'gpt'; there are qwen3-0.6b, "),
    ):
        with pytest.raises(ValueError, match=said):
            geometries.unmade_model(name, layers, precision)


def test_what_does_not_fit_into_memory_is_not_made(
    small_geometries: None, monkeypatch: Patch, capsys: Printed
) -> None:
    """And what the message advises does fit."""
    command = ["paper bench", "--geometry", "qwen3-4b:qwen3-8b", "--quantize", "none", "-n", "1",
               "--table", "switch", "-p"]  # fmt: skip
    whole = geometries.GEOMETRIES["qwen3-4b"] | {"num_hidden_layers": 36}
    for name in ("qwen3-4b", "qwen3-8b"):
        monkeypatch.setitem(geometries.GEOMETRIES, name, whole)
    made = geometries.unmade_model("qwen3-4b", None, "float32")
    limit = int(1.2 * geometries.memory.weights_bytes(made))  # of one, not of two
    monkeypatch.setattr(geometries.memory, "free", lambda: limit)
    evaluated = geometries.mx.eval
    monkeypatch.setattr(geometries.mx, "eval", None)
    assert run([*command, "12"]) == 2
    error = capsys.readouterr().err
    assert "of memory are needed (weights of random qwen3-4b " in error and error.count("\n") == 1
    monkeypatch.setattr(geometries.mx, "eval", evaluated)
    layers = re.search(r"take -c layers=(\d+) or -c precision=4bit, end", error)[1]
    assert int(layers) > 2
    assert run([*command, "12", "-c", f"layers={layers}"]) == 0
    assert run([*command, "12", "-c", "precision=4bit"]) == 0
    capsys.readouterr()
    assert run([*command, "40000", "-c", f"layers={layers}"]) == 2  # the caches' fault
    assert "caches of 40000 tokens" in capsys.readouterr().err
