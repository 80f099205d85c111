"""Which way a prompt is read: by the caller, or by the times of this pair on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.generate import generate as mlx_generate
from mlx_lm.sample_utils import make_logits_processors

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.engine import plan, timings
from kvlingo_mlx.engine.hybrid import Native
from kvlingo_mlx.engine.timings import Timings
from kvlingo_mlx.loading import models
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.timing import saving, tables
from kvlingo_mlx.translators.base import Translator
from tests.support.identity import TOKENS


@pytest.fixture(scope="module")
def pair(models: dict[str, LanguageModel]) -> tuple[LanguageModel, LanguageModel, Translator]:
    source, target = models["dense"], models["wide"]
    return source, target, kv.fit(source, target, [{"text": "a b c d e f g h " * 12}])


def planted(
    pair: tuple[LanguageModel, LanguageModel, Translator],
    lengths: Sequence[int],
    native: Sequence[float],
    accelerator: Sequence[float],
) -> Path:
    source, target, translator = pair
    key = timings.key_of(source, target, translator)
    seconds = {"native": native, "accelerator": accelerator, "switch": [1e-3] * len(lengths)}
    return timings.write(Timings(key, tuple(lengths), {k: tuple(v) for k, v in seconds.items()}))


# ---- native -------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_size", [7, 2048])
def test_native_is_mlx_lms_own(
    pair: tuple[LanguageModel, LanguageModel, Translator],
    monkeypatch: pytest.MonkeyPatch,
    step_size: int,
) -> None:
    source, target, _ = pair
    monkeypatch.setattr(capture, "prefill", None)  # the source reads nothing
    monkeypatch.setattr(plan, "resolve_translator", None)
    penalty = {"logits_processors": make_logits_processors(repetition_penalty=1.5)}
    options: dict[str, Any] = {"max_tokens": 12, "prefill_step_size": step_size, **penalty}
    expected = mlx_generate(target.model, target.tokenizer, TOKENS, **options)
    responses = list(kv.stream_generate(source, target, TOKENS, strategy="native", **options))
    assert "".join(r.text for r in responses) == expected
    last = responses[-1]
    assert last.strategy == "native" and last.prompt_tokens == len(TOKENS)
    assert last.translate_s == 0 and 0 < last.prefill_s < last.ttft_s
    assert last.prompt_tps == pytest.approx(len(TOKENS) / last.ttft_s)


def test_native_with_a_draft_and_a_quantised_cache(
    pair: tuple[LanguageModel, LanguageModel, Translator],
) -> None:
    source, target, _ = pair
    plain = mlx_generate(target.model, target.tokenizer, TOKENS, max_tokens=12)
    options: dict[str, Any] = {"strategy": "native", "max_tokens": 12}
    assert kv.generate(source, target, TOKENS, draft_model=source, **options) == plain
    bits = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    expected = mlx_generate(source.model, source.tokenizer, TOKENS, max_tokens=12, **bits)
    assert kv.generate(target, source, TOKENS, **options, **bits) == expected


def test_native_needs_no_translator_and_reads_no_weights_of_the_source(
    folders: dict[str, Path], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy: dict[str, bool] = {}
    load = models.load

    def noted(model: Any, **options: Any) -> LanguageModel:
        lazy[str(model)] = options.get("lazy", False)
        return load(model, **options)

    monkeypatch.setattr(models, "load", noted)
    dense, wide = (str(folders[name]) for name in ("dense", "wide"))
    assert kv.generate(dense, wide, TOKENS, strategy="native", max_tokens=2)
    assert lazy == {dense: True, wide: False}


# ---- auto ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "native", "accelerator", "expected"),
    [
        # Here len(TOKENS) lies on, between, below and beyond what was measured.
        ([len(TOKENS)], [1.0], [0.5], "accelerator"),
        ([len(TOKENS)], [0.5], [1.0], "native"),
        ([10, 400], [1.0, 9.0], [0.5, 8.0], "accelerator"),
        ([10, 400], [0.5, 8.0], [1.0, 9.0], "native"),
        ([1000, 2000], [4.0, 8.0], [3.0, 9.0], "accelerator"),
        ([1000, 2000], [3.0, 9.0], [4.0, 8.0], "native"),
        ([5, 10], [1.0, 2.0], [0.9, 1.0], "accelerator"),
        ([5, 10], [0.9, 1.0], [1.0, 2.0], "native"),
        ([len(TOKENS)], [1.0], [0.99], "native"),  # a gain within the noise is none
    ],
)
def test_auto_goes_by_the_timings(
    pair: tuple[LanguageModel, LanguageModel, Translator],
    lengths: list[int],
    native: list[float],
    accelerator: list[float],
    expected: str,
) -> None:
    source, target, translator = pair
    planted(pair, lengths, native, accelerator)
    first = next(kv.stream_generate(source, target, TOKENS, translator=translator, strategy="auto"))
    assert first.strategy == expected
    assert (first.translate_s > 0) == (expected == "accelerator")


def test_auto_reads_no_weights_of_a_translator_it_does_not_use(
    pair: tuple[LanguageModel, LanguageModel, Translator],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target, translator = pair
    folder = translator.save(tmp_path / "t")
    planted(pair, [10], [1.0], [2.0])
    monkeypatch.setattr(plan, "resolve_translator", None)
    options: dict[str, Any] = {"translator": folder, "strategy": "auto", "max_tokens": 2}
    assert kv.generate(source, target, TOKENS, **options)


def test_one_token_is_not_worth_any_timings(
    pair: tuple[LanguageModel, LanguageModel, Translator],
) -> None:
    source, target, _ = pair
    expected = mlx_generate(target.model, target.tokenizer, TOKENS[:1], max_tokens=6)
    options: dict[str, Any] = {"strategy": "auto", "max_tokens": 6}
    assert kv.generate(source, target, TOKENS[:1], **options) == expected


def test_without_timings_auto_says_what_to_type(
    pair: tuple[LanguageModel, LanguageModel, Translator],
) -> None:
    source, target, translator = pair
    advice = f"bench --source {source.name} --target {target.name} --translator FOLDER --save"
    with pytest.raises(kv.MissingTimingsError, match=advice):
        kv.generate(source, target, TOKENS, translator=translator, strategy="auto")
    with pytest.raises(kv.MissingTimingsError, match="--translator mine --save-timings"):
        timings.read(timings.key_of(source, target, translator), ZOO, "mine")
    with pytest.raises(kv.MissingTimingsError, match="in floats, not in 8 bits; leave out"):
        timings.read(timings.key_of(source, target, replace(translator, bits=8)), ZOO, "mine")


# ---- whose timings are -------------------------------------------------------------------------


def test_timings_are_of_this_pair_precision_maps_and_machine(
    pair: tuple[LanguageModel, LanguageModel, Translator],
    quantised_models: dict[str, LanguageModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target, translator = pair
    planted(pair, [10], [1.0], [2.0])
    key = timings.key_of(source, target, translator)
    assert timings.read(key, ("a", "b")).best(10) == "native"
    small = quantised_models["dense"]
    assert small.norms_fingerprint == source.norms_fingerprint  # the precision alone differs
    for other in (
        timings.key_of(small, target, translator),
        timings.key_of(target, source, translator),
        timings.key_of(source, target, replace(translator, bits=8)),
    ):
        with pytest.raises(kv.MissingTimingsError):
            timings.read(other, ("a", "b"))
    monkeypatch.setattr(timings, "machine", lambda: {**measure.machine(), "chip": "another"})
    with pytest.raises(kv.MissingTimingsError):
        timings.read(timings.key_of(source, target, translator), ("a", "b"))


def with_layers(translator: Translator, layers: int) -> Translator:
    provenance = {**translator.config.provenance, "native_layers": layers}
    return replace(translator, config=replace(translator.config, provenance=provenance))


def test_times_are_of_one_choice_of_native_layers(
    pair: tuple[LanguageModel, LanguageModel, Translator],
) -> None:
    """Those of plain translation say nothing of a hybrid, the translator's or the caller's."""
    source, target, translator = pair
    planted(pair, [10], [2.0], [1.0])
    tuned, most = with_layers(translator, 1), len(target.attentions)
    options: dict[str, Any] = {"strategy": "auto", "max_tokens": 1}

    def taken(translator: Translator, **native: Any) -> str:
        responses = kv.stream_generate(
            source, target, TOKENS, translator=translator, **options, **native
        )
        return next(iter(responses)).strategy

    assert taken(translator) == taken(tuned, native_layers=0) == "accelerator"
    expected = "native_layers 1, native_head 0, native_tail 0 .*--save-timings.*-c native_layers=0"
    own = "with these maps, in this precision"  # bench measures a translator's own layers
    other = "native_layers 2, .*own 1 native layers, which -c native_layers=1 asks for"
    for found, native, text in (
        (tuned, {}, own), (tuned, {"native_layers": "auto"}, own),
        (translator, {"native_layers": 1}, expected), (tuned, {"native_layers": 2}, other),
    ):  # fmt: skip
        with pytest.raises(kv.MissingTimingsError, match=text) as error:
            taken(found, **native)
        assert "\n" not in str(error.value)
    with pytest.raises(kv.MissingTimingsError, match="native_head 3, native_tail 0"):
        taken(translator, native_head=3)
    with pytest.raises(ValueError, match="native_layers is 99; give a number from 0 to"):
        taken(translator, native_layers=99)
    assert taken(translator, native_layers=most) == "native"  # a prefill, by any name
    key = timings.key_of(source, target, translator, Native(layers=1))
    times = {way: (1.0,) for way in timings.WAYS} | {"accelerator": (0.5,)}
    timings.write(Timings(key, (10,), times))
    assert taken(tuned) == "accelerator"
    plain = timings.key_of(source, target, translator)
    assert plain == timings.key_of(source, target, tuned, Native()) != key


def test_times_are_of_one_size_of_chunks(
    pair: tuple[LanguageModel, LanguageModel, Translator], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, translator = pair
    planted(pair, [10], [2.0], [1.0])
    options: dict[str, Any] = {"translator": translator, "strategy": "auto", "max_tokens": 1}
    with pytest.raises(kv.MissingTimingsError, match="--prefill-step-size 16 --save-timings"):
        kv.generate(source, target, TOKENS, prefill_step_size=16, **options)
    kept = saving.timings_of(source, target, translator, [tables.Timing(
        10, {"native": [1.0], "accelerator": [2.0], "switch": [1.0]}
    )], 16)  # fmt: skip
    timings.write(kept)
    for step_size, way in ((16, "native"), (2048, "accelerator")):
        responses = kv.stream_generate(
            source, target, TOKENS, prefill_step_size=step_size, **options
        )
        assert next(iter(responses)).strategy == way


def test_a_source_that_drafts_reads_the_prompt_anyway(
    pair: tuple[LanguageModel, LanguageModel, Translator],
) -> None:
    """Its prefill is then no reason against the accelerator: a switch is what it costs beyond."""
    source, target, translator = pair
    planted(pair, [10], [1.0], [1.5])  # and a switch takes a millisecond
    options: dict[str, Any] = {"translator": translator, "strategy": "auto", "max_tokens": 2}
    for draft, way in ((None, "native"), (target, "native"), (source, "accelerator")):
        responses = kv.stream_generate(source, target, TOKENS, draft_model=draft, **options)
        assert next(iter(responses)).strategy == way


@pytest.mark.parametrize("part", [{"native_layers": 99}, {"native_head": 1}, {"native_tail": 1}])
def test_native_has_no_parts(
    pair: tuple[LanguageModel, LanguageModel, Translator],
    part: dict[str, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target, _ = pair
    with pytest.raises(ValueError, match="with strategy='native', by which the target reads"):
        kv.generate(source, target, TOKENS, strategy="native", **part)
    ((name, value),) = part.items()
    command = ["generate", "--prefill-model", ZOO[0], "--decode-model", ZOO[1], "--prompt", "x"]
    command += ["--strategy", "native", "-c", f"{name}={value}"]
    assert run(command) == 2
    error = capsys.readouterr().err
    assert "by which --target reads all of the prompt" in error and error.count("\n") == 1


def test_between_lengths_and_beyond_them() -> None:
    # Seconds that grow as a power of the length lie on a straight line of the logarithms.
    lengths = (64, 256, 1024)
    seconds = {"native": tuple(1e-3 * n**1.5 for n in lengths), "accelerator": (1.0, 3.0, 2.0)}
    found = Timings({}, lengths, seconds)
    for tokens in (2, 64, 100, 700, 1024, 9000):
        assert found.at("native", tokens) == pytest.approx(1e-3 * tokens**1.5)
    assert found.at("accelerator", 4096) == pytest.approx(2.0)  # noise that falls goes on level
    steep = Timings({}, (64, 128), {"native": (1.0, 16.0)})
    assert steep.at("native", 256) == pytest.approx(64.0)
    assert Timings({}, (64,), {"native": (0.5,)}).at("native", 4096) == 0.5


def of_all(times: list[Any]) -> dict[str, Any]:
    return {"seconds": {way: times for way in timings.WAYS}}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"profile_version": 2}, "profile_version is 2, expected 1"),
    ({"more": 1}, "its fields are"),
    ({"key": {}}, "its key is of another pair"),
    ({"prompt_tokens": [64, 10]}, "prompt_tokens is \\[64, 10\\]"),
    ({"prompt_tokens": []}, "prompt_tokens is \\[\\]"),
    ({"prompt_tokens": [10, True]}, "prompt_tokens is"),
    ({"seconds": {"native": [1.0, 2.0]}}, "seconds must be of"),
    (of_all([1.0]), "must be 2 positive numbers"),
    (of_all([1.0, -1.0]), "must be 2 positive numbers"),
    (of_all([1.0, float("nan")]), "must be 2 positive"),
    (of_all([1.0, "2"]), "must be 2 positive numbers"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_damaged_timings_are_refused(
    pair: tuple[LanguageModel, LanguageModel, Translator], change: dict[str, Any], message: str
) -> None:
    source, target, translator = pair
    path = planted(pair, [10, 20], [1.0, 2.0], [1.0, 2.0])
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(kv.MalformedTimingsError, match=message) as found:
        kv.generate(source, target, TOKENS, translator=translator, strategy="auto")
    assert str(path) in str(found.value) and "--save-timings" in str(found.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 10**6, b"null"])
def test_a_file_that_holds_no_timings_is_refused(
    pair: tuple[LanguageModel, LanguageModel, Translator], content: bytes
) -> None:
    source, target, translator = pair
    planted(pair, [10], [1.0], [2.0]).write_bytes(content)
    with pytest.raises(kv.MalformedTimingsError):
        kv.generate(source, target, TOKENS, translator=translator, strategy="auto")


def test_writing_replaces_at_once_and_refuses_nonsense(
    pair: tuple[LanguageModel, LanguageModel, Translator], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = planted(pair, [10], [1.0], [2.0])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="cannot be kept"):
        planted(pair, [], [], [])

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as context:
        context.setattr(timings.os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            planted(pair, [10], [3.0], [1.0])
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    assert planted(pair, [10], [3.0], [1.0]) == path and path.read_bytes() != before


# ---- from the command line ----------------------------------------------------------------------

ZOO = ("tiny-qwen3-s", "tiny-qwen3-moe")


def test_bench_keeps_timings_that_generate_goes_by(
    store: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    models = [arg for pair in zip(("--prefill-model", "--decode-model"), ZOO, strict=True)
              for arg in pair]  # fmt: skip
    prompt = ["generate", *models, "--prompt", "Anna is in Lima.", "-m", "2", "--strategy", "auto",
              "--no-thinking"]  # fmt: skip
    assert run(prompt) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: strategy auto needs timings") and error.count("\n") == 1
    bench = ["bench", "--source", ZOO[0], "--target", ZOO[1], "-n", "2", "-p", "16,64",
             "--quantize", "none", "--save-timings"]  # fmt: skip
    assert run(bench) == 0
    assert "timings kept for --strategy auto: 16 tokens " in capsys.readouterr().out
    record = tmp_path / "record.jsonl"
    assert run([*prompt, "--json", str(record)]) == 0
    taken = json.loads(record.read_text())["results"]["strategy"]
    readers = {"native": "read by the target", "accelerator": "(accelerator)"}
    assert readers[taken] in capsys.readouterr().out
    (path,) = (store.parent / "timings").iterdir()
    facts = json.loads(path.read_text())
    assert facts["prompt_tokens"] == [16, 64] and set(facts["seconds"]) == set(timings.WAYS)
    source, target = (kv.load(zoo(name)) for name in ZOO)
    found = timings.read(facts["key"], ZOO)
    assert found.best(len(encode(
        target, [{"role": "user", "content": "Anna is in Lima."}], False
    ))) == taken  # fmt: skip
    assert source.geometry.fingerprint == facts["key"]["source"]["geometry"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--strategy", "fast"], "strategy is 'fast'; give accelerator, native or"),
        (["generate", "--strategy", "switch"], "which only a conversation has"),
        (["bench", "--save-timings", "--table", "quant"], "does not time every way"),
        (["bench", "--save-timings", "--geometry", "a:b"], "whose models are random"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if arguments[0] == "generate":
        arguments += ["--prefill-model", ZOO[0], "--decode-model", ZOO[1], "--prompt", "x"]
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_random_maps_make_no_timings(
    folders: dict[str, Path], store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--source", str(folders["dense"]), "--target", str(folders["moe"])]
    assert run([*arguments, "--save-timings"]) == 2
    assert "error: no translator from" in capsys.readouterr().err
