"""Targets that several ranks of ``mlx.launch`` hold together, beside one process that holds all."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx import cli
from kvlingo_mlx.caches.memory import weights_bytes
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.loading import models
from kvlingo_mlx.machines import ranks, sharded
from kvlingo_mlx.machines.ranks import Ranks
from kvlingo_mlx.machines.sharded import ShardedModel
from tests.support import TESTS, hybrid_models, tiny
from tests.support.ranks import (
    DRAWN,
    QUESTIONS,
    SIDES,
    TOKENS,
    answer,
    held,
    launched,
    shared,
    talks,
)

SOURCE = ("qwen3", dict(seed=21, layers=4, kv_heads=4, head_dim=16))
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", dict(seed=22, layers=5, kv_heads=4, head_dim=32)),
    "qwen3_moe": ("qwen3_moe", dict(seed=23, layers=5, kv_heads=4, head_dim=32)),
    "llama": ("llama", dict(seed=24, layers=5, kv_heads=4, head_dim=16)),
    "deepseek_v3": ("deepseek_v3", dict(seed=25, layers=5, kv_heads=4, head_dim=16)),
}
# Target, kind of map, and whether the source is sharded, too. Each process starts for seconds and
# every step waits for all of them, so these are few.
CASES: list[tuple[str, str, bool]] = [
    ("qwen3", "mixing", False), ("llama", "mlp", False), ("deepseek_v3", "mixing", True),
    ("qwen3_moe", "mixing", True), ("qwen3", "head-wise", False),
]  # fmt: skip
BY_FOUR = CASES[-1:]  # ranks; the others are for two
ENDS = ("tiny-qwen3-s", "tiny-qwen3-l")
MODULE = ("-m", "tests.support.ranks")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Those above: what ranks are told of each."""
    root, found = tmp_path_factory.mktemp("sharded"), []
    small = tiny.write_tiny_model(root / "small", SOURCE[0], **SOURCE[1])
    name, options = TARGETS["deepseek_v3"]
    latent = tiny.write_tiny_model(root / "latent", name, **{**options, "seed": 26, "layers": 4})
    for name, kind, both in CASES:
        family, options = TARGETS[name]
        target = tiny.write_tiny_model(root / name, family, **options)
        source = latent if name == "deepseek_v3" else small
        folder = root / "-".join([name, kind, *(["sharded"] if both else [])])
        alone = kind == "mixing" and not both
        tiny.write_random_translator(
            folder, source, target, nu=2, head_mixing=kind != "head-wise", bias=alone
        )
        if kind == "mlp":
            like, folder = folder, root / f"{folder.name}2"
            tiny.write_mlp_translator(folder, like)
        found.append({
            "name": folder.name, "source": str(source), "target": str(target),
            "translator": str(folder), "tokens": tiny.random_tokens(33), "sharded": both,
            "native_layers": 2 if alone else 0,
        })  # fmt: skip
    return found


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.filterwarnings("ignore::kvlingo_mlx.KVLingoWarning")
def test_ranks_hold_together_what_one_process_holds(
    cases: list[dict[str, Any]], tmp_path: Path, count: int
) -> None:
    """Caches to 1e-5, sixteen tokens; drawn ones are the same on every rank."""
    split = len(CASES) - len(BY_FOUR)
    cases = cases[:split] if count == 2 else cases[split:]
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"folder": str(tmp_path), "cases": cases}))
    done = shared(count, *MODULE, str(job))
    assert done.returncode == 0, done.stdout[-2000:]
    for case in cases:
        source, target = kv.load(case["source"]), kv.load(case["target"])
        cache = kv.hand_over(
            source, target, case["tokens"], translator=case["translator"], prefill_step_size=7,
            native_layers=case["native_layers"],
        )  # fmt: skip
        whole, layers = dict(held(cache)), len(cache)
        tokens = answer(source, target, case)
        every = [dict(np.load(tmp_path / f"{case['name']}-{rank}.npz")) for rank in range(count)]
        for rank, own in enumerate(every):
            assert own["answer"].tolist() == tokens, case["name"]
            assert own["drawn"].tolist() == every[0]["drawn"].tolist()
            assert len(own) == 2 * layers + 4
            check_counts(case, count, own, source, target)
            for layer in range(layers):
                for side in SIDES:
                    expected, got = whole[f"{layer}.{side}"], own[f"{layer}.{side}"]
                    if len(got) < len(expected):  # heads are shared, in order
                        heads = len(expected) // count
                        expected = expected[rank * heads : (rank + 1) * heads]
                    close = np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
                    assert got.shape == expected.shape and close, (case["name"], rank, layer, side)
        drawn = every[0]["drawn"].tolist()
        assert len(tokens) == TOKENS and len(drawn) == DRAWN != tokens[:DRAWN]


def check_counts(
    case: dict[str, Any], count: int, own: dict[str, Any], source: Any, target: Any
) -> None:
    """Bytes that a rank has sent for a hand-over, and of what it has loaded, by hand."""
    assert own["loaded"] < weights_bytes(target)
    facts = 1_100 * (count - 1)  # bytes in which versions, models and the prompt are compared
    width = sum(layer.width("keys") + layer.width("values") for layer in source.geometry.layers)
    states = 4 * width * (len(case["tokens"]) - 1)
    inner = 4 * source.model.args.hidden_size * (len(case["tokens"]) - 1)  # one hidden state
    sums = 2 * (len(source.geometry.layers) - 1)  # of the last layer nothing but the cache is used
    share = (count - 1) / count
    expected = share * states + 2 * share * sums * inner if case["sharded"] else 0
    if case["native_layers"] or "deepseek" in case["name"]:
        return  # the target's own layers send, too; latents are not sent
    assert expected <= own["sent"] <= expected + facts, (case["name"], own["sent"], expected)


@pytest.mark.filterwarnings("ignore::kvlingo_mlx.KVLingoWarning")
def test_ranks_that_differ_are_told(cases: list[dict[str, Any]], tmp_path: Path) -> None:
    """Another translator on one rank. (One that dies: test_server_ranks.)"""
    one, other = cases[0], tmp_path / "other"
    tiny.write_random_translator(other, Path(one["source"]), Path(one["target"]), seed=5)
    job = tmp_path / "job.json"
    case = {**one, "translators": {"1": str(other)}}
    job.write_text(json.dumps({"folder": str(tmp_path), "cases": [case]}))
    done = shared(2, *MODULE, str(job))
    told = "rank 1 has another translator than rank 0"
    assert done.returncode and done.stdout.count(told) == 2, done.stdout[-2000:]
    assert not list(tmp_path.glob("*.npz"))


def test_in_a_terminal(tmp_path: Path) -> None:
    """A verb: the first rank speaks, for all; each saves its own part."""
    verb = str(Path(sys.executable).parent / "kvlingo-mlx")
    record = tmp_path / "record.jsonl"
    words = ["chat", "--source", str(zoo(ENDS[0])), "--target", str(zoo(ENDS[1])), "--no-thinking",
             "--temp", "0", "--save", str(tmp_path / "kept"), "--json", str(record)]  # fmt: skip
    asked = "What is the home of Paul?"
    typed = f"The home of Paul is Oslo. {asked}\n/use target\n/what\n{asked}\n"
    done = launched(2, verb, *words, typed=f"{typed}/exit\n")
    told = done.stdout + done.stderr
    assert done.stdout.count("The home of Paul is Oslo.") == 2, told[-2000:]
    assert told.count("error:") == told.count("rank 0: error: there is no /what; there are") == 1
    assert len(record.read_text().splitlines()) == 1
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["rank-0-of-2", "rank-1-of-2"]


def test_one_rank_that_lacks_memory_ends_all() -> None:
    """With one line, that of the rank which lacks it; what the other one hears is no message."""
    verb = (
        f"exec {sys.executable} -m kvlingo_mlx.cli generate --source {ENDS[0]} --target {ENDS[1]}"
    )
    less = "if [ $MLX_RANK = 1 ]; then export KVLINGO_MEMORY_LIMIT=0.0001; fi"
    done = launched(2, "bash", "-c", f"{less}; {verb} --prompt Hello")
    told = done.stdout + done.stderr
    assert told.count("error: ") == 1 and "Traceback" not in told, told
    assert "rank 1: error: " in told and "MB of memory are needed (weights of tiny-qwen3-s" in told


def test_what_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """mlx-lm could share a hybrid, but its states have no heads that a translator knows."""
    hybrid = hybrid_models.write_hybrid_model(tmp_path / "hybrid", "qwen3_5")
    gemma = tiny.write_tiny_model(tmp_path / "gemma", "gemma3_text", **SOURCE[1])
    for model, count, shard, message in (
        (zoo(ENDS[1]), 1, "tensor", "this program runs alone; start it on several ranks"),
        (zoo(ENDS[1]), 3, "tensor", "has 4 heads, which 3 ranks cannot share evenly: start 2"),
        (zoo(ENDS[1]), 2, "pipeline", "shard is 'pipeline'; give tensor, or leave it out"),
        (hybrid, 2, "tensor", "hybrid keeps recurrent states, which"),
        (gemma, 2, "tensor", r"mlx-lm cannot shard .*gemma \(gemma3_text\)"),
    ):
        monkeypatch.setattr(sharded, "here", lambda count=count: Ranks(0, count))
        with pytest.raises((ValueError, kv.UnsupportedModelError), match=message):
            kv.load(model, shard=shard)


def part_of(model: kv.LanguageModel) -> ShardedModel:
    """A model that another rank would hold, too."""
    own = {each.name: getattr(model, each.name) for each in dataclasses.fields(kv.LanguageModel)}
    return ShardedModel(**own, whole=model, group=Ranks(0, 2))


def test_what_a_part_cannot_do_is_refused() -> None:
    """Before anything is read, so no rank waits for another."""
    small, large = (kv.load(zoo(name)) for name in ENDS)
    mistral, prompt = kv.load(TESTS / "zoo" / "models" / "tiny-mistral"), "Hello, you! " * 9
    with pytest.raises(kv.UnsupportedModelError, match="draft_model cannot be used with a model"):
        kv.generate(small, part_of(large), prompt, draft_model=small, max_tokens=4)
    with pytest.raises(kv.UnsupportedModelError, match="models of another tokenizer cannot be"):
        kv.Conversation({"a": part_of(large), "b": mistral})
    with pytest.raises(kv.UnsupportedModelError, match="two tokenizers cannot be used with a"):
        there = TESTS / "zoo" / "translators" / "tiny-mistral--tiny-qwen3-s"
        kv.generate(mistral, part_of(small), prompt, translator=there)
    with pytest.raises(kv.UnsupportedModelError, match="prompt_cache cannot be used with a model"):
        kv.hand_over(part_of(small), large, prompt, prompt_cache=make_prompt_cache(small.model))
    with pytest.raises(ValueError, match="whole models, and tiny-qwen3-s is spread over 2"):
        kv.fit(part_of(small), large, [])


@pytest.mark.parametrize("can", [True, False])
def test_a_source_is_whole_where_it_fits(monkeypatch: pytest.MonkeyPatch, can: bool) -> None:
    """Else each rank has some of its heads, if mlx-lm can shard it."""

    load_whole = models.load

    def load(name: str, *, lazy: bool, shard: str | None = None) -> kv.LanguageModel:
        if shard and name == ENDS[0] and not can:
            raise kv.UnsupportedModelError("mlx-lm cannot shard it")
        found = load_whole(name, lazy=lazy)
        return part_of(found) if shard else found

    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(models, "here", lambda: Ranks(0, 2))
    monkeypatch.setattr(Ranks, "gathered", lambda self, value: [True, value])
    for free, both in ((None, False), (10**9, False), (10**6, can)):
        monkeypatch.setattr(models.memory, "free", lambda free=free: free)
        source, target = models.open_pair(*ENDS, "Hello")
        assert source.group.several == both and target.group.several, free


@pytest.mark.parametrize("verb", ["pair", "bench", "eval"])
def test_other_verbs_run_in_one_process(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks would write one folder, or wait for one keyboard."""
    monkeypatch.setenv("MLX_RANK", "1")
    waited: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)  # for the first rank's line
    assert run([verb, "--source", "a"]) == 2 and waited == [cli.FIRST_S]
    told = f"rank 1: error: {verb} runs in one process; start it without mlx.launch\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("told", [ranks.LOST, ranks.ENDED])
def test_a_rank_that_hears_no_other_tells_it_in_a_line(
    told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it meets is MLX's error, or what it finds wrong in what was told: in time the launcher
    ends it, since another one has said why."""
    waited: list[float] = []

    def fails(*_: Any, **__: Any) -> None:
        raise (RuntimeError if told == ranks.LOST else kv.KVLingoError)(told)

    monkeypatch.setattr(cli, "command_line", fails)
    monkeypatch.setattr(ranks.time, "sleep", waited.append)
    with pytest.raises((RuntimeError, kv.KVLingoError), match="peer was lost|has ended"):
        run(["generate", "--debug"])
    monkeypatch.setenv("MLX_RANK", "0")
    assert run(["generate"]) == 2 and waited == [ranks.ENDS_S]
    assert capsys.readouterr().err == f"rank 0: error: {ranks.ENDED}\n"


SMALL, LARGE, MOE = (str(zoo(f"tiny-qwen3-{name}")) for name in ("s", "l", "moe"))
HEALED = {"heal": "interleaved", "guard": 16, "on_doubt": "heal"}
TALKS: list[dict[str, Any]] = [
    {"name": "both", "target": LARGE, "sharded": True, "rules": HEALED},
    {"name": "moe", "target": MOE, "rules": {"offload": "disk"}},
]


@pytest.mark.filterwarnings("ignore::kvlingo_mlx.KVLingoWarning")
def test_ranks_talk_as_one_process_does(tmp_path: Path) -> None:
    """Answers, then caches after healing, saving and resuming, of each rank's heads."""
    cases = [{**case, "source": SMALL} for case in TALKS]
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"folder": str(tmp_path), "talks": cases}))
    done = shared(2, *MODULE, str(job))
    assert done.returncode == 0, done.stdout[-3000:]
    for case in cases:
        models = {"small": kv.load(SMALL), "large": kv.load(case["target"])}
        whole = talks(models, tmp_path / case["name"], **case.get("rules", {}))
        assert len(whole["said"]) == len(QUESTIONS) and len(set(whole["said"])) > 1
        for rank in range(2):
            own = dict(np.load(tmp_path / f"{case['name']}-{rank}.npz"))
            assert own["said"].tolist() == whole["said"].tolist(), (case["name"], rank)
            assert own.keys() == whole.keys()
            for key in (key for key in own if key.endswith((".keys", ".values"))):
                got, expected = own[key], whole[key]
                if len(got) < len(expected):
                    expected = np.split(expected, 2)[rank]
                apart = np.linalg.norm(got - expected) / np.linalg.norm(expected)
                assert got.shape == expected.shape and apart < 1e-5, (case["name"], key, apart)
    # Whole models are refused for what ranks have saved.
    models, saved = {"small": kv.load(SMALL), "large": kv.load(LARGE)}, tmp_path / "both-saved"
    talk = kv.Conversation(models)
    talk.reply("small", "Hello", max_tokens=1)
    for call in (lambda: kv.Conversation.resume(saved, models), lambda: talk.save(saved)):
        with pytest.raises(kv.MalformedConversationError, match="was saved by 2 ranks of mlx."):
            call()
