"""From two models to a translator in the store, by one call, interrupted and resumed."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx import making as made_here
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import bundled, dialogues, zoo
from kvlingo_mlx.embedded.lookback import lookback
from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.making import pace
from kvlingo_mlx.making import run as making
from kvlingo_mlx.making.pace import ANSWERS, ConversationCost, Lengths, lengths
from kvlingo_mlx.making.result import AS_IT_IS
from kvlingo_mlx.making.run import Making
from kvlingo_mlx.stage1.passes import ClosedForm
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training import distill
from kvlingo_mlx.training.distill import Distillation
from kvlingo_mlx.training.on_mlx.pair import MLXPair
from kvlingo_mlx.training.plan import TrainingPlan, make_config
from tests.support import tiny
from tests.support.fixtures import Folders, Models, Patch, Printed

MINUTES = 0.05
FITTING, BESIDES, done = pace.FITTING, Making._besides, Making.done
USUAL = dialogues.held_out


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("KVLINGO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pace, "FITTING", 1e9)  # however slow this machine is
    monkeypatch.setattr(pace, "FEWEST_STEPS", 0)
    monkeypatch.setattr(Making, "_besides", lambda self, measured: 0.0)
    for name, few in (("CHATS", 200), ("HELD_OUT", 8), ("TUNED_ON", 2)):
        monkeypatch.setattr(making, name, few)
    monkeypatch.setattr(pace, "ENOUGH", 4)
    monkeypatch.setattr(bundled, "COUNT", 1)
    short = functools.partial(dialogues.held_out, facts=(2, 3), questions=1)
    monkeypatch.setattr(dialogues, "held_out", short)  # for contexts of 512 tokens
    return tmp_path / "home"


def test_two_models_in_a_translator_out(
    folders: Folders, home: Path, tmp_path: Path, capsys: Printed
) -> None:
    """Without any data, by the verb: five lines, native layers, a place in the store."""
    ends = [str(folders[name]) for name in ("dense", "wide")]
    record = tmp_path / "record.jsonl"
    line = ["pair", *ends, "--minutes", str(MINUTES)]
    assert run([*line, "--max-kl", "0", "--json", str(record)]) == 0
    out, err = capsys.readouterr()
    assert all(line.startswith("warning: ") for line in err.splitlines())
    said = out.splitlines()
    folder = tmp_path / "dense-to-wide"
    assert len(said[-5:]) == 5 and said[-5].startswith(f"{folder.name}: nu = ")
    assert "generated conversations" in said[-5] and said[-4].startswith("grade: ")
    assert f"kvlingo-mlx chat --model small={ends[0]} --model large={ends[1]}" in said[-1]
    config = translator_folder.read_config(folder)
    facts = config.provenance
    assert facts["stage"] == 2 and facts["tuning"]["max_kl"] == 0
    assert facts["data"] == ["generated conversations"]
    assert facts["native_layers"] == 3, "no translation is without any KL: all layers are read"
    (stored,) = (home / "translators").iterdir()
    assert translator_folder.read_config(stored).provenance["native_layers"] == 3
    found = json.loads(record.read_text())["results"]
    assert config.nu == 3 and facts["matching"] == 0.5 and found["curve"]
    left = {path.name for path in tmp_path.iterdir()}
    made = {folder.name, f"{folder.name}.log.jsonl", "home", "record.jsonl"}
    assert left == made
    # Once more: nothing is done again.
    before = (folder / translator_folder.WEIGHTS_FILE).stat().st_mtime_ns
    assert run(line) == 0
    assert "finished already" in capsys.readouterr().out
    assert (folder / translator_folder.WEIGHTS_FILE).stat().st_mtime_ns == before


def test_what_a_refusal_advises_is_taken(
    models: Models, generated: str, monkeypatch: Patch
) -> None:
    """Too little time leaves nothing behind that binds the next command; one model is refused, and
    another pair's folder."""
    ends = models["dense"], models["wide"]
    with monkeypatch.context() as patch:
        patch.setattr(pace, "FEWEST_STEPS", 10**9)
        with pytest.raises(ValueError, match=r"minutes are too few here.*give --minutes \d+"):
            kv.pair(*ends, [generated], minutes=MINUTES / 2, out="t")
    assert not Path("t.pair").exists()
    made = kv.pair(*ends, [generated], minutes=MINUTES, capture="post_norm", out="t").config
    assert made.provenance["stage"] == 2 and made.capture == "post_norm"
    with pytest.raises(ValueError, match="one model.*give two models"):
        kv.pair(models["dense"], models["dense"], [generated], minutes=MINUTES, out="u")
    with pytest.raises(ValueError, match="post_norm keys from .*dense to .*wide; give another"):
        kv.pair(models["wide"], models["dense"], [generated], minutes=MINUTES, out="t")
    with pytest.raises(ValueError, match="holds a translator of post_norm keys.*give another"):
        kv.pair(*ends, [generated], minutes=MINUTES, capture="pre_norm", out="t")
    again = kv.pair(*ends, [generated], minutes=MINUTES, capture="post_norm", out="t")
    assert again.config == made  # left as it is


def test_stopped_anywhere_it_goes_on(
    models: Models, generated: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Killed in either stage: no length or fit is made again, and other minutes are refused."""
    ends, fits, run = (models["dense"], models["wide"]), [], ClosedForm.run
    monkeypatch.setattr(ClosedForm, "run", lambda self: (fits.append(self), run(self))[1])
    judge = Distillation._judge
    for stage in ("matching", "stage2"):

        def stop(self: Distillation, entry: Any, stage: str = stage) -> None:
            if self.checkpoint is not None and self.checkpoint.path.stem == stage:
                raise KeyboardInterrupt
            judge(self, entry)

        with monkeypatch.context() as patch:
            patch.setattr(Distillation, "_judge", stop)
            with pytest.raises(KeyboardInterrupt):
                kv.pair(*ends, [generated], minutes=MINUTES, out="t")
        monkeypatch.setattr(Making, "_lengths", None)
    assert len(fits) == 2, "a first stage that is stopped is made anew, and kept where it ended"
    with pytest.raises(ValueError, match=r"minutes was 0\.05, is 5.*remove the folder"):
        kv.pair(*ends, [generated], minutes=5, out="t")
    result = kv.pair(*ends, [generated], minutes=MINUTES, out="t")
    assert len(fits) == 2
    assert result.config.provenance["stage"] == 2 and not result.bundled_data
    assert not Path("t.pair").exists() and not Path("t.partial").exists()
    assert kv.load_translator("t").config == result.config


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"minutes": 0}, "minutes is 0; give a number above 0"),
        ({"capture": "rope"}, "capture .*rope.*pre_norm"),
        ({"min_recall": 1.5}, "min_recall is 1.5; give a share from 0 to 1"),
        ({"data": ["nowhere.jsonl"]}, "nowhere.jsonl"),
    ],
)
def test_bad_arguments(models: Models, tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as found:
        kv.pair(models["dense"], models["wide"], **{"out": "t", **options})
    assert "\n" not in str(found.value)
    assert not Path("t").exists()


def paces(
    speed: float, mean: float = 0.6, answer: int = ANSWERS
) -> Callable[[int], ConversationCost]:
    """A machine that reads a token with one model in ``speed`` seconds."""

    def pace_of(longest: int) -> ConversationCost:
        prefix = mean * longest
        return ConversationCost(prefix, (2 * prefix + answer) * speed, 3 * answer * speed)

    return pace_of


@pytest.mark.parametrize("speed", [1e-6, 1e-3])
@pytest.mark.parametrize("context", [512, 40_960])
def test_lengths_follow_the_pace(
    models: Models, monkeypatch: Patch, speed: float, context: int
) -> None:
    """An hour of a fast machine and of slow ones, for a long context and a short one."""
    monkeypatch.undo()
    config = make_config(models["dense"], models["wide"], TrainingPlan())
    found = lengths(paces(speed), 3600.0, context, {1: config})
    assert found.max_continuation == ANSWERS and 1 <= found.fit_samples <= 400
    most = 16_384 if context == 40_960 else 512  # more would only cut the answers
    assert found.max_prefix in [most >> n for n in range(6)]
    if speed <= 1e-5:
        assert found.max_prefix == most

    def steps(longest: int) -> int:
        prefix = 0.6 * longest
        return int(0.9 * 0.8 * 3600 / (4 * (2 * prefix + 4 * ANSWERS) * speed))

    assert abs(found.steps - steps(found.max_prefix)) <= 1 and found.steps >= 20
    assert found.steps >= 2000 or found.max_prefix == 512
    assert found.max_prefix == most or steps(2 * found.max_prefix) < 2000, "longer was too slow"
    assert Lengths(**vars(found)) == found
    # Reading takes half the time, unless there is time to read all that the steps take.
    reading = (1.2 * found.max_prefix + ANSWERS) * speed
    for room in (1e9, 60):
        reads = found.reads(2000.0, room)
        wanted = max(40, min(2000 / 2 / reading, room))
        assert reads is None if wanted >= 4 * found.steps else abs(reads - wanted) <= 1


def test_all_conversations_are_long(models: Models) -> None:
    """An agent's logs: none fits into the shorter lengths, which are left out."""
    config, pace_of = make_config(models["dense"], models["wide"], TrainingPlan()), paces(1e-3)
    found = lengths(
        lambda longest: None if longest < 4096 else pace_of(longest), 3600, 40_960, {1: config}
    )
    assert found.max_prefix == 4096
    with pytest.raises(ValueError, match="no conversation of the data fits into a context of 512"):
        lengths(lambda longest: None, 3600, 512, {1: config})


@pytest.mark.parametrize(("speed", "besides"), [(0.07, 0.0), (3.0, 5000.0)])
def test_too_little_time_is_refused(
    models: Models, monkeypatch: Patch, speed: float, besides: float
) -> None:
    """With the minutes that would do: with these, it is not refused, with fewer it is.

    ``besides`` are seconds for the models that are read, and the receipt.
    """
    monkeypatch.undo()
    config = make_config(models["dense"], models["wide"], TrainingPlan())

    def steps(minutes: float) -> int:
        rest = 60.0 * minutes, 40_960, {1: config}, lambda pace: besides
        return lengths(paces(speed), *rest).steps

    with pytest.raises(ValueError, match=r"4 minutes are too few here: .*`fit`") as told:
        steps(4)
    found = re.findall(r"--minutes (\d+) at least, (\d+) for 300", str(told.value))[0]
    few, some = map(int, found)
    assert steps(few) >= 20 and steps(some) >= 300
    with pytest.raises(ValueError, match="are too few"):
        steps((few - 1) / 1.2)


def test_it_ends_within_its_minutes(models: Models, generated: str, monkeypatch: Patch) -> None:
    """By a clock of planted speed: reading, learning and the receipt are all that takes time."""
    short = functools.partial(dialogues.held_out, facts=(2, 3), questions=1)
    for place, name, value in (
        (pace, "FITTING", FITTING), (Making, "_besides", BESIDES), (bundled, "held_out", short),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, value)
    now, receipts = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    for module in (made_here, making, pace, distill):
        monkeypatch.setattr(module, "time", clock)

    def slow(name: str, seconds: float) -> None:
        function = getattr(MLXPair, name)

        def slowly(pair: MLXPair, *rest: Any, **more: Any) -> Any:
            sample = next(getattr(each, "sample", each) for each in rest
                          if isinstance(getattr(each, "sample", each), Sample))  # fmt: skip
            now[0] += seconds * (len(sample.prefix) + len(sample.continuation))
            return function(pair, *rest, **more)

        monkeypatch.setattr(MLXPair, name, slowly)

    for name, seconds in (("read", 0.001), ("loss", 0.002), ("match", 0.001), ("spans", 0.001)):
        slow(name, seconds)
    receipt = MLXPair.receipt

    def measured(pair: MLXPair, *rest: Any) -> Any:
        receipts.append(0.001 * bundled.receipt_rows(pair.target.tokenizer, 512))
        now[0] += receipts[-1]
        return receipt(pair, *rest)

    monkeypatch.setattr(MLXPair, "receipt", measured)
    made = kv.pair(models["dense"], models["wide"], [generated], minutes=2.0, out="t")
    assert made.config.provenance["steps"] > 2 and len(receipts) == 1 and receipts[0] > 0.5
    assert 0.6 * 120 < now[0] <= 120


def test_source_layers_that_are_named_or_fit(
    models: Models, generated: str, monkeypatch: Patch
) -> None:
    ends = models["dense"], models["wide"]
    made = kv.pair(*ends, generated, minutes=MINUTES, nu=2, out="t")
    assert made.config.nu == 2
    with pytest.raises(ValueError, match="nu"):
        kv.pair(*ends, generated, minutes=MINUTES, nu=4, out="u")  # they have three layers

    def check(pair: MLXPair, config: TranslatorConfig, *rest: Any) -> str:
        if config.nu > 1:
            raise kv.NotEnoughMemoryError("too much")
        return ""

    monkeypatch.setattr(MLXPair, "check_memory", check)
    assert kv.pair(*ends, generated, minutes=MINUTES, out="v").config.nu == 1


def test_a_target_that_cannot_be_matched_is_distilled(
    models: Models, generated: str, tmp_path: Path
) -> None:
    """The attention of DeepSeek-V3 is given other entries than its cache holds."""
    model_type, facts = tiny.FAMILIES["deepseek_v3"]
    ends = [
        kv.load(tiny.write_tiny_model(tmp_path / f"{seed}", model_type, **{**facts, "seed": seed}))
        for seed in (1, 2)
    ]
    made = kv.pair(*ends, generated, minutes=MINUTES, out="t").config.provenance
    assert made["stage"] == 2 and "matching" not in made


def test_the_chats_differ_and_can_be_rendered(models: Models) -> None:
    found = list(lookback(200))
    assert found == list(lookback(200)) and found[0] != next(lookback(1, seed=1))
    assert len({json.dumps(chat) for chat in found}) == 200
    for chat in found:
        roles = [message["role"] for message in chat if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"] for message in chat)
    tokenizer = models["dense"].tokenizer
    assert all(tokenizer.apply_chat_template(chat) for chat in found[:20])


def test_two_tokenizers_cannot_be_tuned(tmp_path: Path) -> None:
    from tests.support.two_tokenizers import write_mistral, write_qwen

    ends = str(write_qwen(tmp_path / "qwen")), str(write_mistral(tmp_path / "mistral"))
    with pytest.raises(IncompatibleTranslatorError, match="two tokenizers"):
        kv.pair(*ends, minutes=MINUTES, min_recall=0.9)


def test_dialogues_must_fit_before_any_work(models: Models, monkeypatch: Patch) -> None:
    monkeypatch.setattr(dialogues, "held_out", USUAL)
    with pytest.raises(ValueError, match="the context of .*dense is 512; leave --max-kl"):
        kv.pair(models["dense"], models["wide"], minutes=MINUTES, max_kl=0.1, out="t")
    assert not list(Path().glob("t*"))


def test_another_translator_in_the_store_is_left_alone(
    models: Models, generated: str, monkeypatch: Patch
) -> None:
    ends = models["dense"], models["wide"]
    first = kv.pair(*ends, generated, minutes=MINUTES, out="t")
    assert first.stored is not None and not first.bundled_data
    digest = kv.load_translator(first.stored).digest
    monkeypatch.setattr(making, "NUS", (first.config.nu,))  # the same form again
    other = kv.pair(*ends, generated, minutes=MINUTES, seed=1, out="u")
    assert other.stored is None and "left as it is" in other.lines[-1]
    assert "kvlingo-mlx import u --force" in other.lines[-1]
    assert kv.load_translator(first.stored).digest == digest
    # The same one again: what it was trained on is known, whatever is asked for now.
    again = kv.pair(*ends, minutes=MINUTES, out="t")
    assert again.stored == first.stored and not again.bundled_data
    # A tuning of a finished translator may be stopped.
    with monkeypatch.context() as patch:
        patch.setattr(making.tuning, "smallest", lambda *a, **k: (_ for _ in ()).throw(
            KeyboardInterrupt
        ))  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            kv.pair(*ends, generated, minutes=MINUTES, max_kl=0.0, out="t")
    monkeypatch.setattr(Making, "train", None)
    assert kv.pair(*ends, generated, minutes=MINUTES, max_kl=0.0, out="t").config.native_layers == 3
    assert not Path("t.pair").exists()


def fused(folder: Path, scale: float) -> Path:
    """tiny-qwen3-s with a random product of rank 2 added to each projection, as `mlx_lm.fuse` does.

    ``scale`` is its size as a share of the projection's own.
    """
    rng, weights = np.random.default_rng(7), folder / "model.safetensors"
    shutil.copytree(zoo("tiny-qwen3-s"), folder)
    arrays = dict(mx.load(str(weights)))
    for name, array in arrays.items():
        if name.endswith("proj.weight"):
            low = rng.normal(size=(len(array), 2)) @ rng.normal(size=(2, array.shape[1]))
            own = np.linalg.norm(np.array(array.astype(mx.float32)))
            added = mx.array(low * scale * own / np.linalg.norm(low))
            arrays[name] = (array + added).astype(array.dtype)
    mx.save_safetensors(str(weights), arrays, {"format": "mlx"})
    return folder


@pytest.mark.parametrize(("scale", "works"), [(0.02, True), (2.0, False)])
def test_a_model_and_its_lora_need_nothing_learnt(
    home: Path, tmp_path: Path, monkeypatch: Patch, capsys: Printed, scale: float, works: bool
) -> None:
    """Both ways; the target answers from the very cache. A change that is too large is learnt."""
    monkeypatch.undo()  # the bundled dialogues are measured as they are
    monkeypatch.setenv("KVLINGO_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    trained: list[Making] = []
    monkeypatch.setattr(Making, "train", lambda self: trained.append(self))
    monkeypatch.setattr(Making, "done", lambda self: None if trained else done(self))
    tuned = str(fused(tmp_path / "lora", scale))
    for number, ends in enumerate((("tiny-qwen3-s", tuned), (tuned, "tiny-qwen3-s"))):
        said: list[str] = []
        made = kv.pair(*ends, callbacks=kv.making.Callbacks(said.append), out=str(number))
        assert AS_IT_IS in said[0] and bool(trained) is not works
        if not works:
            assert "useless" in said[0] and not Path(str(number)).exists()
            continue
        assert "works" in said[0] and len(made.lines) == 3 and "--nu 1" in made.lines[0]
        assert made.config.provenance["projections"]["source"] and made.stored is not None
        source, target = map(kv.load, ends)
        tokens, translator = tiny.random_tokens(40, seed=2), kv.load_translator(made.folder)
        taken = kv.hand_over(source, target, tokens, translator=translator)
        read = make_prompt_cache(source.model)
        source.model(mx.array([tokens[:-1]]), cache=read)
        for one, other in zip(taken, read, strict=True):
            for ours, theirs in zip(one.keys_and_values(), other.keys_and_values(), strict=True):
                assert mx.abs(ours - theirs).max().item() < 1e-3 * mx.abs(theirs).max().item()
        kv.pair(*ends, callbacks=kv.making.Callbacks(said.append), out=str(number))
        assert "finished already" in said[-1]
