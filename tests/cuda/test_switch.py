"""A switch on a GPU as it is timed, run on a CPU: what is made, written and recorded."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvlingo_mlx.cuda import scene as scenes  # noqa: E402
from kvlingo_mlx.cuda import switch, vllm_serving  # noqa: E402
from kvlingo_mlx.cuda.agreement import check_agreement  # noqa: E402
from kvlingo_mlx.cuda.grouped import (  # noqa: E402
    Group,
    GroupedMemory,
    GroupedTranslation,
    groups_of,
)
from kvlingo_mlx.cuda.memory import kept_of  # noqa: E402
from kvlingo_mlx.cuda.model import TorchModel  # noqa: E402
from kvlingo_mlx.cuda.shapes import (  # noqa: E402
    FORMS,
    PAIRS,
    SERVED,
    SHAPES,
    Form,
    ends_of,
    forms_of,
    nu_of,
)
from kvlingo_mlx.errors import KVLingoError, MissingExtraError  # noqa: E402
from kvlingo_mlx.format.assignment import identity  # noqa: E402
from kvlingo_mlx.format.maps import expected_shapes  # noqa: E402
from kvlingo_mlx.format.translator_config import TranslatorConfig  # noqa: E402
from tests.support import paper_tables  # noqa: E402

BENCHMARKS = ROOT / "benchmarks"
TABLES = paper_tables.FILE
TRIAL = {"device": "cpu", "dtype": "float32", "gemm": 16, "trials": 2}
TARGETS = ("tiny-l", "tiny-moe", "tiny-gemma-s", "tiny-gemma-l")


def made(name: str, dtype: Any = torch.float32) -> TorchModel:
    torch.manual_seed(1)
    target = scenes.build_target(name, "cpu", dtype, None)
    for attention in target.attentions:  # else norms of ones, or zeros, hide how they act
        torch.nn.init.normal_(attention.k_norm.weight, 0.3, 0.2)
    return target


# ---- shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.721), ("qwen3-4b", 4.022), ("qwen3-8b", 8.191),
     ("qwen3-30b-a3b", 30.532), ("gemma-3-4b", 3.880), ("gemma-3-12b", 11.766)],
)  # fmt: skip
def test_widths_are_the_released_ones(name: str, billions: float) -> None:
    """All parameters of the text model, by transformers' own class; one number off would show."""
    with torch.device("meta"):
        config = scenes.config_of(scenes.shape_of(name))
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_shapes_are_those_that_the_paper_states() -> None:
    """Sections "Cross-layer cache translation" and "Computational gains"."""
    layers = {"qwen3-0.6b": 28, "qwen3-1.7b": 28, "qwen3-4b": 36, "qwen3-8b": 36,
              "qwen3-30b-a3b": 48, "gemma-3-4b": 34, "gemma-3-12b": 48}  # fmt: skip
    heads = {"qwen3-30b-a3b": 4, "gemma-3-4b": 4, "gemma-3-12b": 8, "gemma-3-12b-4kv": 4}
    for name, depth in layers.items():
        spec = scenes.source_spec(name, None)
        assert len(spec.layers) == depth
        assert {g.kv_heads for g in spec.layers} == {heads.get(name, 8)}
        assert {g.key_dim for g in spec.layers} == {256 if "gemma" in name else 128}
    for name in ("gemma-3-4b", "gemma-3-12b", "gemma-3-12b-4kv"):
        windows = [g.window for g in scenes.source_spec(name, None).layers]
        assert windows[:6] == [1024] * 5 + [None]  # a global layer every five local ones
        assert [i for i, w in enumerate(windows) if w is None] == list(range(5, len(windows), 6))
    narrow, whole = SHAPES["gemma-3-12b-4kv"], SHAPES["gemma-3-12b"]
    assert {k for k in whole if whole[k] != narrow[k]} == {"num_key_value_heads"}


@pytest.mark.parametrize("name", TARGETS)
def test_transformers_runs_a_shape_as_its_config_says(name: str) -> None:
    """Windows and rotations, by the check that a released model goes through."""
    target = made(name)
    check_agreement(target.family, target.model, target.config, name)
    spec = scenes.source_spec(name, None)
    assert spec.layers == target.spec().layers


def test_maps_cost_what_the_paper_says() -> None:
    """Appendix "Computational gains": MFLOP a token; table app:tab:moemlp: parameters of maps."""
    found = {}
    pairs = ("qwen3-0.6b:qwen3-1.7b", "qwen3-8b:qwen3-4b", *PAIRS["app:tab:moe"])
    for pair in pairs:
        source, target = (scenes.source_spec(name, None) for name in ends_of(pair))
        widths = source.layers[0].key_width * target.layers[0].key_width
        found[pair] = 2 * len(target.layers) * widths * nu_of(*ends_of(pair))
    mega = {pair: 2 * numbers / 1e6 for pair, numbers in found.items()}
    assert mega["qwen3-0.6b:qwen3-1.7b"] == pytest.approx(117, abs=0.5)
    assert mega["qwen3-8b:qwen3-4b"] == pytest.approx(151, abs=0.5)
    assert found["qwen3-4b:qwen3-30b-a3b"] / 1e6 == pytest.approx(151, abs=0.5)
    assert found["qwen3-30b-a3b:qwen3-4b"] / 1e6 == pytest.approx(113, abs=0.5)


def test_every_pair_of_the_papers_tables_has_a_plan() -> None:
    settings = switch.Settings(device="cpu")
    plans = {p: switch.plan(p, settings) for pairs in PAIRS.values() for p in pairs}
    assert len(plans) == 12
    for pair, plan in plans.items():
        assert plan["tokens"] == [2048, 4096, 8192, 16384, 32768] and plan["dtype"] == "bfloat16"
        assert plan["nu"] == (3 if "30b" in pair else 1), pair
        uneven = "30b" in pair or "gemma" in pair
        assert ("head-wise" in plan["forms"]) != uneven, pair
        assert (plan["windows"] == {"source": 1024, "target": 1024}) == ("gemma" in pair)
    assert plans["qwen3-4b:qwen3-30b-a3b"]["kv_heads"] == {"source": 8, "target": 4}
    assert switch.plan("qwen3-4b:qwen3-1.7b", dataclasses.replace(settings, nu=8))["nu"] == 8


def test_the_pairs_of_tab_cost_stand_in_its_order() -> None:
    tables = {t["label"]: t for t in map(json.loads, TABLES.read_text().splitlines())}
    names = list(dict.fromkeys(row[0] for row in tables["tab:cost"]["rows"]))
    small_first = [tuple(part.split("-")[1].lower().split("/")) for part in names]
    wanted = []
    for small, large in small_first:
        wanted += [f"qwen3-{large}:qwen3-{small}", f"qwen3-{small}:qwen3-{large}"]
    assert list(PAIRS["tab:cost"]) == wanted
    served = [row[1] for row in tables["app:tab:vllm"]["rows"]]
    assert len(served) == len(SERVED)
    for told, name in zip(served, SERVED, strict=True):
        assert told.lower().replace(", 4 kv heads", "-4kv") == name


# ---- what is translated -----------------------------------------------------------------------


def loops(
    config: TranslatorConfig, tensors: dict[str, Any], states: list[Any], target: TorchModel
) -> list[list[np.ndarray]]:
    """Layer by layer and token by token in float64: keys and values (H, T, D) of each layer."""
    found, shape = [], target.config
    dim, heads = shape["head_dim"], shape["num_key_value_heads"]
    for t, layer in enumerate(config.target.layers):
        sides = []
        for side, given in zip(("keys", "values"), states, strict=True):
            weight = tensors[f"{side}.{t}.weight"].double().numpy()
            read = np.concatenate([given[s] for s in config.assignment.side(side)[t]], axis=-1)
            first = 0 if layer.window is None else max(0, len(read) - layer.window + 1)
            out = np.zeros((heads, len(read) - first, dim))
            for n in range(first, len(read)):
                state = (weight @ read[n]).reshape(heads, dim)
                if side == "keys" and config.capture == "pre_norm":
                    state = state / np.sqrt((state**2).mean(-1, keepdims=True) + 1e-6)
                    gain = target.attentions[t].k_norm.weight.double().numpy()
                    state = state * (gain + ("gemma" in target.name))
                if side == "keys" and config.capture != "post_rope":
                    local = layer.window is not None
                    scaled = 8.0 if "rope_scaling" in shape else 1.0
                    base, factor = (1e4, 1.0) if local else (1e6, scaled)
                    angles = n / factor * base ** (-np.arange(0, dim, 2) / dim)
                    a, b = state[:, : dim // 2], state[:, dim // 2 :]
                    cos, sin = np.cos(angles), np.sin(angles)
                    state = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
                out[:, n - first] = state
            sides.append(out)
        found.append(sides)
    return found


@pytest.mark.parametrize("nu", [1, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "pair", ["tiny-gemma-s:tiny-gemma-l", "tiny-gemma-l:tiny-gemma-s", "tiny-s:tiny-moe"]
)
def test_windows_and_other_head_counts_equal_a_loop(pair: str, form: str, nu: int) -> None:
    """Of 5 tokens no window forgets any; of 21 each does."""
    names = ends_of(pair)
    if form not in forms_of(*names):
        assert form == "head-wise"  # of other numbers of KV heads the paper has none
        return
    target = made(names[1])
    source = scenes.source_spec(names[0], None)
    for tokens in (5, 21):
        config, tensors = translator(source, target, FORMS[form], nu)
        fast = GroupedTranslation.build(config, tensors, target, tokens, torch.float64)
        scene = scenes.make_scene(source, target, tokens)
        memory = GroupedMemory.allocate(target, tokens, torch.float64)
        memory.fill(math.nan)
        given = [array.double() for array in scene.given(FORMS[form])]
        fast(given, memory)
        rows = [a if a.ndim == 3 else a.transpose(1, 2).flatten(2) for a in given]  # (Ls, T, width)
        wanted = loops(config, tensors, [a.numpy() for a in rows], target)
        for (keys, values), theirs in zip(memory.held(tokens), wanted, strict=True):
            for ours, exact in zip((keys, values), theirs, strict=True):
                assert ours.shape == exact.shape
                assert np.linalg.norm(ours.numpy() - exact) < 2e-6 * np.linalg.norm(exact)


def translator(
    source: Any, target: TorchModel, form: Form, nu: int
) -> tuple[TranslatorConfig, dict[str, Any]]:
    from kvlingo_mlx.format.assignment import by_depth

    assignment = by_depth(source.layers, target.geometry.layers, nu)
    config = TranslatorConfig(
        source, target.spec(), assignment, head_mixing=form.head_mixing, capture=form.capture
    )
    shapes = expected_shapes(config, ())
    return config, {n: torch.randn(s) / math.sqrt(s[-1]) for n, s in shapes.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_a_model_goes_on_from_its_own_translated_states(name: str) -> None:
    """The identity of a model's own states is its own cache: a step's logits are those of a whole
    pass by transformers, which knows nothing of this memory."""
    target, tokens = made(name), 21
    config = TranslatorConfig(target.spec(), target.spec(), identity(len(target.attentions)))
    eye = torch.eye(config.target.layers[0].key_width)
    tensors = dict.fromkeys(expected_shapes(config, ()), eye)
    fast = GroupedTranslation.build(config, tensors, target, tokens)
    scene = scenes.make_scene(target.spec(), target, tokens)
    ids = scene.ids[0].tolist()
    states = target.states(ids[:-1])
    with torch.no_grad():
        wanted = target.model(scene.ids).logits[0, -1]
        fast([torch.stack(states.side(side)) for side in ("keys", "values")], scene.memory)
        assert torch.allclose(scene.step()[0], wanted, atol=1e-5)
        assert torch.allclose(scene.step()[0], wanted, atol=1e-5)  # a step leaves no trace
        assert torch.allclose(scene.read(0, tokens + 1, 5)[0], wanted, atol=1e-5)
        scene.memory.memories[0].keys[:, :, -3] += 1
        assert not torch.allclose(scene.step()[0], wanted, atol=1e-4)


def test_windows_hold_what_the_next_token_sees() -> None:
    assert [kept_of(8, n) for n in (1, 7, 8, 30)] == [1, 7, 7, 7] and kept_of(None, 30) == 30
    target = made("tiny-gemma-l")
    assert groups_of(target) == [Group((0, 1, 3, 4, 6), 8), Group((2, 5), None)]
    assert len(groups_of(made("tiny-moe"))) == 1
    memory = GroupedMemory.allocate(target, 30, torch.float32)
    entry = 2 * 2 * 16 * 4
    assert memory.nbytes == entry * (5 * 7 + 2 * 31)


def test_what_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = made("tiny-gemma-l"), scenes.source_spec("tiny-gemma-s", None)
    fast, exact = scenes.translators(source, target, 1, 21)["mixing"]
    scene = scenes.make_scene(source, target, 21)
    options = {"method": "torch"}
    assert scenes.error_of(scene, FORMS["mixing"], fast, exact, options) < 1e-5
    other = GroupedTranslation(fast.groups, tuple(reversed(fast.parts)))
    with pytest.raises((ValueError, RuntimeError)):
        scenes.error_of(scene, FORMS["mixing"], other, exact, options)
    lazy = GroupedTranslation(fast.groups[:1], fast.parts[:1])
    with pytest.raises(RuntimeError, match="some keys of layer 2 were not written"):
        monkeypatch.setattr(GroupedTranslation, "__call__", _first_group(lazy))
        scenes.error_of(scene, FORMS["mixing"], fast, exact, options)


def _first_group(lazy: GroupedTranslation) -> Any:
    whole = GroupedTranslation.__call__

    def call(self: Any, states: Any, memory: Any, start: int = 0, **options: Any) -> None:
        first = GroupedMemory(memory.groups[:1], memory.memories[:1])
        whole(lazy, states, first, start, **options)

    return call


# ---- the record -------------------------------------------------------------------------------


def test_what_is_measured() -> None:
    settings = switch.Settings(
        **TRIAL, tokens=(9, 21), prefill_chunk=10, cuts=((4096, 4, 1), (8, 1, 0))
    )
    pairs = ["tiny-s:tiny-l", "tiny-l:tiny-s", "tiny-gemma-s:tiny-gemma-l", "tiny-s:tiny-moe"]
    told: list[tuple[str, int]] = []
    results = switch.time_pairs(
        pairs, settings, lambda pair, one: told.append((pair, one["tokens"]))
    )
    assert told == [(pair, n) for pair in pairs for n in (9, 21)]
    assert json.loads(json.dumps(results)) == results and list(results["plans"]) == pairs
    widths = {"tiny-s:tiny-l": 3 * 32 * 32, "tiny-l:tiny-s": 2 * 32 * 32}
    for pair, found in results["pairs"].items():
        forms = results["plans"][pair]["forms"]
        assert forms == [f for f in FORMS if f != "head-wise" or pair in widths]
        for length in found:
            rows = length["rows"]
            named = {f"translation: {form}, torch {cut}"
                     for form in forms for cut in ("4096,4,1", "8,1,0")}  # fmt: skip
            named |= {"step", "switch", "re-prefill"}
            assert set(rows) == named | ({"bare products"} if pair == "tiny-l:tiny-s" else set())
            assert all(len(row["samples_s"]) == 2 for row in rows.values())
            assert all(row.get("error", 0) < 1e-5 for row in rows.values())
            if pair in widths:
                flops = length["tokens"] * 2 * 2 * widths[pair]
                assert rows["translation: mixing, torch 8,1,0"]["flops"] == flops
                assert rows["translation: head-wise, torch 8,1,0"]["flops"] == flops / 2
            assert length["peak_bytes"] == {} and length["prefill_chunk"] == 10
            (ratios,) = length["ratios"].values()
            both = (rows[name]["samples_s"] for name in ("re-prefill", "switch"))
            assert ratios == [slow / quick for slow, quick in zip(*both, strict=True)]
    # Windows: 5 of 7 layers translate 7 tokens alone; one source layer of 16 into 32 numbers.
    row = results["pairs"]["tiny-gemma-s:tiny-gemma-l"][1]["rows"][
        "translation: mixing, torch 8,1,0"
    ]
    assert row["flops"] == 2 * 2 * 16 * 32 * (5 * 7 + 2 * 21)


def test_the_script_is_a_thin_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cuda_switch

    record = tmp_path / "record.jsonl"
    trial = ["--device", "cpu", "--dtype", "float32", "--gemm", "16", "--trials", "1"]
    pair = ["--pairs", "tiny-s:tiny-l", "--json", str(record)]
    cuda_switch.main([*trial, *pair, "--tokens", "9", "21"])
    printed = capsys.readouterr().out
    assert "tiny-s to tiny-l, 21 tokens" in printed and "GB/s" in printed
    assert "memory" not in printed and "graph" not in printed  # not measured
    found = json.loads(record.read_text())
    assert found["kind"] == "cuda_switch" and found["config"]["pairs"] == ["tiny-s:tiny-l"]
    assert (found["config"]["batch"], found["config"]["stack"]) == (1, "transformers")
    assert cuda_switch.parse(["--device", "cpu", "--label", "tab:gemma3"]).pairs == [
        "gemma-3-12b:gemma-3-4b", "gemma-3-4b:gemma-3-12b"
    ]  # fmt: skip
    for wrong, told in (
        (["--pairs", "qwen3-0.6b"], "the pair is 'qwen3-0.6b'; give SOURCE:TARGET of"),
        (["--pairs", "tiny-s:tiny-l", "--nu", "9"], "nu is 9; tiny-s has 2 layers here"),
        (["--pairs", "tiny-s:tiny-l", "--tokens", "50000"], "tokens hold 50000; the context"),
        (["--pairs", "gemma-3-4b:gemma-3-12b", "--layers", "3"], "layers is 3; of gemma-3-4b:"),
        (["--trials", "0"], "trials holds 0"),
        (["--tokens", "0"], "tokens holds 0"),
        (["--vllm", "--pairs", "tiny-s:tiny-l", "--tokens", "9"], "vLLM cannot be imported here"),
    ):
        with pytest.raises(SystemExit):
            cuda_switch.main([*trial, *wrong])
        assert told in capsys.readouterr().err


def test_without_a_gpu_it_is_refused_before_anything_is_made() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(KVLingoError, match="no CUDA GPU here; run this on a machine that has one"):
        switch.time_pairs(PAIRS["tab:cost"], switch.Settings())


def test_a_run_that_fails_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cuda_switch

    run, record = switch.time_length, tmp_path / "record.jsonl"

    def fails(scene: Any, *more: Any) -> Any:
        if scene.num_tokens == 7:
            raise torch.OutOfMemoryError("planted")
        return run(scene, *more)

    monkeypatch.setattr(switch, "time_length", fails)
    options = ["--device", "cpu", "--dtype", "float32", "--pairs", "tiny-s:tiny-l", "--gemm", "16",
               "--trials", "1", "--json", str(record), "--tokens"]  # fmt: skip
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        cuda_switch.main([*options, "5", "7"])
    kept = json.loads(record.read_text())
    (found,) = kept["results"]["pairs"]["tiny-s:tiny-l"]
    assert found["tokens"] == 5 and kept["config"]["failed"]
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        cuda_switch.main([*options, "7"])
    assert len(record.read_text().splitlines()) == 1


# ---- vLLM -------------------------------------------------------------------------------------


class Planted:
    """A vLLM of planted times: 1 ms a prompt token, 5 ms for each generated after the first."""

    __version__ = "9.9"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, short: bool = False) -> None:
        self.now, self.opened, self.prompts, self.asked = 0.0, [], [], []
        self.configs: list[dict[str, Any]] = []
        self.short = short
        monkeypatch.setattr(vllm_serving, "perf_counter", lambda: self.now)
        monkeypatch.setitem(sys.modules, "vllm", self)  # type: ignore[arg-type]

    def SamplingParams(self, **given: Any) -> dict[str, Any]:
        self.asked.append(given)
        return given

    def LLM(self, **given: Any) -> Planted:
        self.opened.append(given)
        self.configs.append(json.loads((Path(given["model"]) / "config.json").read_text()))
        return self

    def generate(self, prompts: Any, asked: Any, use_tqdm: bool) -> list[Any]:
        ((prompt,), count) = (prompts, asked["max_tokens"] - self.short)
        self.prompts.append(prompt["prompt_token_ids"])
        self.now += 1e-3 * len(prompt["prompt_token_ids"]) + 5e-3 * (count - 1)
        answer = types.SimpleNamespace(token_ids=list(range(count)))
        return [types.SimpleNamespace(outputs=[answer])]


def test_vllm_is_asked_as_the_paper_did(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Planted(monkeypatch)
    serving = vllm_serving.Serving(tokens=(20, 40), requests=3, decoded=5)
    names = ("qwen3-0.6b", "gemma-3-12b-4kv")
    results = vllm_serving.time_models(names, serving)
    assert results["version"] == "9.9" and list(results["models"]) == list(names)
    for found in results["models"].values():
        assert [length["tokens"] for length in found] == [20, 40]
        for length in found:
            assert length["first_token"] == pytest.approx([1e-3 * length["tokens"]] * 3)
            assert length["per_token"] == pytest.approx([5e-3] * 3)
    for opened in planted.opened:
        assert opened["enable_prefix_caching"] is False and opened["load_format"] == "dummy"
        assert opened["max_model_len"] == 45 and opened["dtype"] == "bfloat16"
    assert len({tuple(prompt) for prompt in planted.prompts}) == len(planted.prompts)
    assert all(asked["ignore_eos"] and asked["temperature"] == 0 for asked in planted.asked)
    kinds = [config["architectures"] for config in planted.configs]
    assert kinds == [["Qwen3ForCausalLM"], ["Gemma3ForCausalLM"]]
    narrow = planted.configs[1]
    assert (narrow["num_key_value_heads"], narrow["num_hidden_layers"]) == (4, 48)
    assert narrow["hidden_size"] == 3840 and narrow["layer_types"].count("full_attention") == 8
    config = vllm_serving.config_of_record(names, serving)
    assert config["requests"] == 3 and config["client"] == "in process"
    defaults = vllm_serving.Serving()
    assert (defaults.requests, defaults.decoded, defaults.dtype) == (16, 128, "bfloat16")


def test_vllm_that_cannot_serve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(MissingExtraError, match="vLLM cannot be imported here .*pip install"):
            vllm_serving.time_models(["tiny-s"], vllm_serving.Serving(tokens=(9,)))
    for wrong, told in (
        ((["gpt"], {"tokens": (9,)}), "the model is 'gpt'; give some of qwen3-0.6b"),
        ((["qwen3-8b"], {"tokens": (40_900,)}), "41028 tokens are beyond the context of qwen3-8b"),
        ((["qwen3-8b"], {"tokens": (9,), "requests": 0}), "asked for 0 requests"),
        ((["qwen3-8b"], {"tokens": ()}), "prompts of none"),
    ):
        with pytest.raises(ValueError, match=told):
            vllm_serving.time_models(wrong[0], vllm_serving.Serving(**wrong[1]))
    Planted(monkeypatch, short=True)
    with pytest.raises(RuntimeError, match="vLLM generated 0 tokens for tiny-s where 1 were asked"):
        vllm_serving.time_models(["tiny-s"], vllm_serving.Serving(tokens=(9,)))
