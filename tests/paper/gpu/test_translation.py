"""Whole prefixes translated at once in PyTorch: against plain loops, and against transformers."""

import math
import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from benchmarks.paper.gpu.switch import FORMS, MapForm, Scene, forms_between, translators  # noqa: E402
from benchmarks.paper.gpu.translation import METHODS, CacheMemory, PrefixTranslation  # noqa: E402
from kvlingo_mlx.cuda.model import TorchModel  # noqa: E402
from kvlingo_mlx.format.assignment import by_depth  # noqa: E402
from kvlingo_mlx.format.maps import expected_shapes  # noqa: E402
from kvlingo_mlx.format.translator_config import TranslatorConfig  # noqa: E402
from tests.support import kinds  # noqa: E402
from tests.support.gpu_scenes import ends_of, made, read  # noqa: E402
from tests.support.translator_folders import SIDES  # noqa: E402

# Triton's interpreter runs kernels on a CPU where TRITON_INTERPRET=1 is set, slowly.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA GPU, or TRITON_INTERPRET=1"
)
TARGETS = ("tiny-l", "tiny-moe", "tiny-gemma-s", "tiny-gemma-l")
PAIRS = """
    tiny-s:tiny-l tiny-gemma-s:tiny-gemma-l tiny-gemma-l:tiny-gemma-s tiny-s:tiny-moe
""".split()


def loops(
    config: TranslatorConfig, tensors: dict[str, Any], states: list[Any], target: TorchModel
) -> list[list[np.ndarray]]:
    """In float64, by plain loops: keys and values (H, T, D) of each layer."""
    arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    given = {s: [a[None] for a in rows] for s, rows in zip(SIDES, states, strict=True)}
    made = kinds.reference(config.to_json(), arrays, given)
    found = []
    for t, layer in enumerate(config.target.layers):
        keys, values = (made[side][t][0] for side in SIDES)
        if config.capture == "pre_norm":
            gain = target.attentions[t].k_norm.weight.double().numpy()
            keys = keys / np.sqrt((keys**2).mean(-1, keepdims=True) + 1e-6)
            keys = keys * (gain + ("gemma" in target.name))
        if config.capture != "post_rope":
            scaled = 8.0 if "rope_scaling" in target.config else 1.0
            base, factor = (1e6, scaled) if layer.window is None else (1e4, 1.0)
            places = np.arange(keys.shape[1])[:, None] / factor
            keys = kinds.rotated(keys, places, base)
        first = 0 if layer.window is None else max(0, keys.shape[1] - layer.window + 1)
        found.append([keys[:, first:], values[:, first:]])
    return found


def translator(
    source: Any, target: TorchModel, form: MapForm, nu: int
) -> tuple[TranslatorConfig, dict[str, Any]]:
    assignment = by_depth(source.layers, target.geometry.layers, nu)
    config = TranslatorConfig(
        source, target.spec(), assignment, head_mixing=form.head_mixing, capture=form.capture
    )
    shapes = expected_shapes(config, ())
    return config, {n: torch.randn(s) / math.sqrt(s[-1]) for n, s in shapes.items()}


@pytest.mark.parametrize("nu", [1, 2])
@pytest.mark.parametrize("pair", PAIRS)
def test_translations_equal_a_loop(pair: str, nu: int) -> None:
    """All forms. Of 5 tokens no window forgets any; of 21 each does."""
    names = ends_of(pair)
    target, source = made(names[1]), read(names[0])
    for form in forms_between(source.layers, target.geometry.layers).values():
        config, tensors = translator(source, target, form, nu)
        for tokens in (5, 21):
            fast = PrefixTranslation.build(config, tensors, target, tokens, torch.float64)
            memory = CacheMemory.allocate(target, tokens, torch.float64)
            for array in (array for sides in memory.arrays for array in sides):
                array.fill_(math.nan)
            given = [array.double() for array in Scene.of(source, target, tokens).given(form)]
            fast(given, memory)
            rows = [a if a.ndim == 3 else a.transpose(1, 2).flatten(2) for a in given]
            wanted = loops(config, tensors, [a.numpy() for a in rows], target)
            for (like, sides), theirs in zip(memory.rooms(), wanted, strict=True):
                for room, exact in zip(sides, theirs, strict=True):
                    ours, end = room[0].numpy(), like.kept(tokens)
                    assert np.isnan(ours[:, end:]).all() and exact.shape[1] == end
                    # transformers' inverse frequencies are float32, and so are the angles.
                    assert np.linalg.norm(ours[:, :end] - exact) < 2e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", TARGETS)
def test_a_model_goes_on_from_its_own_translated_states(name: str) -> None:
    """The identity of a model's own states is its own cache: a step's logits are those of a whole
    pass by transformers, which knows nothing of this memory."""
    target, tokens = made(name), 21
    spec = target.spec()
    config = TranslatorConfig(spec, spec, by_depth(spec.layers, spec.layers))
    eye = torch.eye(config.target.layers[0].width("keys"))
    tensors = dict.fromkeys(expected_shapes(config, ()), eye)
    fast = PrefixTranslation.build(config, tensors, target, tokens)
    scene = Scene.of(target.spec(), target, tokens)
    ids = scene.ids[0].tolist()
    states = target.states(ids[:-1])
    with torch.no_grad():
        wanted = target.model(scene.ids).logits[0, -1]
        fast([torch.stack(states.side(side)) for side in SIDES], scene.memory)
        assert torch.allclose(scene.step()[0], wanted, atol=1e-5)
        assert torch.allclose(scene.step()[0], wanted, atol=1e-5)  # a step leaves no trace
        assert torch.allclose(scene.read(0, tokens + 1, 5)[0], wanted, atol=1e-5)
        scene.memory.arrays[0][0][:, :, -3] += 1
        assert not torch.allclose(scene.step()[0], wanted, atol=1e-4)


@KERNELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nu", [1, 2])
def test_the_kernel_equals_plain_pytorch(
    form: str, dtype: str, nu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    sizes, device = (1, 37, 700), "cuda"
    if INTERPRETED:
        dtype = dtype.replace("bfloat", "float")  # the interpreter multiplies bfloat16's bits
        monkeypatch.setattr(PrefixTranslation, "methods", METHODS)
        sizes, device = (37,), "cpu"
    for pair in ("tiny-s:tiny-l", "tiny-gemma-s:tiny-gemma-l"):
        names = ends_of(pair)
        target = made(names[1], getattr(torch, dtype), device)
        source = read(names[0])
        if form not in forms_between(source.layers, target.geometry.layers):
            continue
        both = translators(source, target, nu, max(sizes))[form]
        for tokens in sizes:
            scene = Scene.of(source, target, tokens)
            most = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
            assert scene.error(FORMS[form], both, "fused") < most
