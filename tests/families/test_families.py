"""Which families there are, how their rotations and configs are read, and what is refused."""

import json
import shutil
from pathlib import Path

from kvlingo_mlx.backend import mx

import mlx_lm.models
import mlx_lm.utils
import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.errors import MissingModelError, UnsupportedModelError
from kvlingo_mlx.families import REASONS, base, family_of, known_families
from kvlingo_mlx.format.geometry import RopeSpec
from tests.support import TESTS, hybrid_models, plain_models, tiny
from tests.support.fixtures import Models
from tests.support.native_caches import TOKENS

NAMES = sorted(plain_models.CONFIGS)


def test_the_page_lists_every_family() -> None:
    page = (TESTS.parent / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    assert page.split("```text\n")[1].split("```")[0].split() == known_families()


def test_every_family_is_run() -> None:
    other = {model_type for model_type, _ in tiny.FAMILIES.values()} - {"converted_mla"}
    wrapped = {"gemma3", "gemma4", "gemma4_unified", "kimi_k2", "joyai_llm_flash"}
    assert {*NAMES, *hybrid_models.CONFIGS, *other, *wrapped} == {*known_families()}


def test_every_family_is_known_by_its_norms(families: Models, tmp_path: Path) -> None:
    """RMSNorm or not: else two checkpoints of one shape would pass for each other."""
    for name in ("phi", "nemotron", "cohere", "llama"):
        other = plain_models.write_plain_model(tmp_path / name, name, seed=2)
        assert kv.load(other).norms_fingerprint != families[name].norms_fingerprint, name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("glm4", RopeSpec("default", 5000.0, 8, True)),
        ("mistral", RopeSpec("default", 5000.0, 16, True)),
        ("cohere", RopeSpec("default", 5000.0, 16, True)),
        ("deepseek", RopeSpec("linear", 5000.0, 16, scaling=(("factor", 2.0),))),
        ("qwen2_moe", RopeSpec("default", 5000.0, 16)),
    ],
)
def test_rotations_are_described_as_they_run(
    name: str, expected: RopeSpec, families: Models
) -> None:
    assert set(families[name].geometry.rope) == {expected}


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["llama", "starcoder2", "deepseek"])
def test_dynamic_rope_is_refused(name: str, field: str, families: Models, tmp_path: Path) -> None:
    """By name, where mlx-lm makes it, refuses it, or passes over it without a word."""
    folder = Path(shutil.copytree(families[name].path, tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    assert kv.load(folder).geometry == families[name].geometry
    config[field] = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="^dynamic NTK RoPE .* with another RoPE sca"):
        kv.load(folder)


MODERN = (
    "apertus", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma2", "glm4", "gpt_oss", "granite",
    "helium", "llama", "ministral3", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "phi",
    "phi3", "phimoe", "qwen2", "qwen2_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip


@pytest.mark.parametrize("name", MODERN)
def test_modern_configs_rotate_alike(name: str, families: Models, tmp_path: Path) -> None:
    """As transformers 5 writes them."""
    transformers = pytest.importorskip("transformers")
    model, copy = families[name], tmp_path / "modern"
    shutil.copytree(model.path, copy)
    transformers.AutoConfig.from_pretrained(model.path).save_pretrained(copy)
    config = json.loads((copy / "config.json").read_text())
    assert "rope_theta" not in config and "rope_parameters" in config
    modern = kv.load(copy)
    assert [(r.type, r.base, r.dims) for r in filter(None, modern.geometry.rope)] == [
        (r.type, r.base, r.dims) for r in filter(None, model.geometry.rope)
    ]
    tokens = mx.array([TOKENS[:40]])
    assert np.array_equal(np.array(modern.model(tokens)), np.array(model.model(tokens)))


def test_every_family_of_mlx_lm_is_supported_or_refused_for_a_reason() -> None:
    reasons = [name for names in REASONS.values() for name in names.split()]
    assert len(set(reasons)) == len(reasons) and not set(reasons) & set(known_families())
    for path in Path(mlx_lm.models.__file__).parent.glob("*.py"):
        if "class Model(nn.Module" in path.read_text():
            assert path.stem in known_families() or path.stem in reasons, path.stem
    for name, run_by in mlx_lm.utils.MODEL_REMAPPING.items():
        assert name in known_families() or name in reasons, name
        assert (name in known_families()) == (run_by in known_families()), name
    with pytest.raises(
        UnsupportedModelError, match="'mamba2' is not supported: it has no layer of"
    ):
        family_of("mamba2")
    with pytest.raises(UnsupportedModelError, match="'t5' is not supported; supported families: "):
        family_of("t5")


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("cohere", {"use_qk_norm": True}, "norms its keys by LayerNorm2D"),
        ("stablelm", {"qk_layernorm": True}, "norms its keys by LayerNormPerHead"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}}},
            "rope_parameters for each kind of layer",
        ),
    ],
)
def test_variants_that_are_refused(name: str, more: dict, message: str, tmp_path: Path) -> None:
    folder = plain_models.write_plain_model(tmp_path, name, **more)
    with pytest.raises(UnsupportedModelError, match=message):
        _ = kv.load(folder).geometry


def test_a_malformed_rotation_is_one_line(tmp_path: Path) -> None:
    folder = plain_models.write_plain_model(tmp_path, "seed_oss", rope_parameters=[1.0])
    with pytest.raises(MissingModelError, match="cannot be loaded"):
        kv.load(folder)


def test_a_setting_under_no_known_name_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plain_models.write_plain_model(tmp_path / "m", "cohere")
    monkeypatch.setattr(base, "NORM_EPS", ("eps_of_others", "epsilon"))
    with pytest.raises(UnsupportedModelError, match="cohere has none of eps_of_others, epsilon"):
        _ = kv.load(folder).geometry
    monkeypatch.setattr(base, "KV_HEADS", ("heads_of_others",))
    with pytest.raises(UnsupportedModelError, match="cohere keeps its number of KV heads under"):
        _ = kv.load(folder).geometry
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="cohere has none of max_position_embeddings"):
        _ = kv.load(folder).context_length
