"""The PyTorch training path: against MLX, finite differences, plain sums, and itself resumed."""

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

from tests.support import tiny
from tests.support.fixtures import Folders, Patch, Printed

torch = pytest.importorskip("torch")

from kvlingo_mlx.cli import run  # noqa: E402
from kvlingo_mlx.cuda import gradients  # noqa: E402
from kvlingo_mlx.cuda import model as torch_model  # noqa: E402
from kvlingo_mlx.cuda.gradients import loss_of  # noqa: E402
from kvlingo_mlx.cuda.model import TorchModel  # noqa: E402
from kvlingo_mlx.cuda.translator import TorchTranslator  # noqa: E402
from kvlingo_mlx.errors import KVLingoError, MissingModelError  # noqa: E402
from kvlingo_mlx.format import translator_folder  # noqa: E402
from kvlingo_mlx.format.geometry import canonical_json, configured_rope  # noqa: E402
from kvlingo_mlx.group import Group  # noqa: E402
from kvlingo_mlx.phases import shown  # noqa: E402
from kvlingo_mlx.stage1.passes import ClosedForm  # noqa: E402
from kvlingo_mlx.tokenization.samples import Sample  # noqa: E402
from kvlingo_mlx.training import checkpoints, distill  # noqa: E402
from kvlingo_mlx.training.distill import Best  # noqa: E402
from kvlingo_mlx.training.objectives import objective_named  # noqa: E402
from kvlingo_mlx.training.plan import TrainingPlan, reconstruction  # noqa: E402
from kvlingo_mlx.training.recipe import Recipe  # noqa: E402
from kvlingo_mlx.training.runtime import pair_of  # noqa: E402
from tests.support.trainings import Random, altered, closed_form, linear_config, log_of, training  # noqa: E402


class Signalled(Random):
    """The same, and a signal as sample number ``at`` is drawn, counted over the stream's life."""

    def __init__(self, at: int, number: int) -> None:
        super().__init__()
        self.at, self.number, self.drawn = at, number, []

    def sample(self, index: int) -> Sample:
        self.drawn.append(index)
        if len(self.drawn) == self.at:
            signal.raise_signal(self.number)
        return super().sample(index)


def test_one_rotation_has_one_fingerprint() -> None:
    """Whatever kind of number a config writes."""
    spellings = (
        {"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 10000},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    )
    assert len({canonical_json(asdict(configured_rope(c, 32))) for c in spellings}) == 1
    plain = {}, {"rope_scaling": {"type": "linear", "factor": 1}}
    assert len({configured_rope(config, 32) for config in plain}) == 1


HEAD = {"lm_head.weight": np.zeros((tiny.VOCAB, 64), np.float32)}
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": lambda t: t.pop(K_PROJ)}, f"1 missing weight.*: {K_PROJ};"),
        ({"weights": lambda t: t.update({K_PROJ: t[K_PROJ][:8]})}, r"misshapen .*\(8, 64\), not"),
        ({"num_hidden_layers": 2}, "11 unexpected weight.*model.layers.2"),
        ({"rms_norm_eps": ...}, "has no rms_norm_eps in its config.json"),
        ({"rope_theta": "fast"}, "cannot be loaded .TypeError"),
        ({"weights": lambda t: t.update(HEAD)}, None),  # tied: a second copy of the embeddings
    ],
    ids="missing misshapen unexpected no-epsilon no-number tied-head".split(),
)
def test_damaged_models_are_refused(
    folders: Folders, tmp_path: Path, change: dict[str, Any], message: str | None
) -> None:
    folder = str(altered(folders["dense"], tmp_path / "damaged", **change))
    if message is None:
        torch_model.load(folder)
        weights = Path(folder, "model.safetensors")
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        message = "damaged cannot be loaded .SafetensorError"
    with pytest.raises(MissingModelError, match=message) as caught:
        torch_model.load(folder)
    assert folder in str(caught.value) and "\n" not in str(caught.value)


def test_a_joint_closed_form_equals_least_squares(torch_models: dict[str, TorchModel]) -> None:
    source, target = torch_models["moe"], torch_models["dense"]
    config = linear_config(source, target, joint=True)
    data = [Random(60, different=99).sample(i) for i in range(10)]
    arrays = closed_form(config, pair_of(source, target), data, ridge=0.0).weights
    read_, wanted = ([model.states(s.prefix) for s in data] for model in (source, target))
    for t, (layer,) in enumerate(config.assignment.keys):
        x = torch.cat([torch.cat([s.keys[layer], s.values[layer]], -1) for s in read_]).double()
        y = torch.cat([torch.cat([s.keys[t], s.values[t]], -1) for s in wanted]).double()
        best = np.linalg.lstsq(x.numpy(), y.numpy(), rcond=1e-4)[0].T
        assert np.abs(arrays[f"joint.{t}.weight"] - best).max() < 1e-4 * np.abs(best).max()


@pytest.mark.parametrize(("name", "weight"), [("kl", 1.0), ("ce", 1.0), ("mixed", 0.3)])
def test_objectives_equal_plain_sums(monkeypatch: Patch, name: str, weight: float) -> None:
    """In float64, in blocks of three tokens, against the formulas written out."""
    monkeypatch.setattr("kvlingo_mlx.cuda.gradients.BLOCK", 3)
    generator = torch.Generator().manual_seed(0)
    student, teacher, head = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((8, 5), (8, 5), (5, 11))
    )
    labels = [3, 1, 4, 1, 5, 9, 2, 6]
    found = loss_of(objective_named(name, weight), lambda h: h @ head, student, teacher, labels)
    p, q = (np.exp((s @ head).numpy()) for s in (teacher, student))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    kl = (p * np.log(p / q)).sum(-1).mean()
    ce = -np.log(q[np.arange(8), labels]).mean()
    expected = {"kl": kl, "ce": ce, "mixed": kl + weight * ce}[name]
    assert found.value == pytest.approx(expected, rel=1e-12)
    assert found.kl == pytest.approx(kl, rel=1e-12)
    onehot = np.eye(11)[labels]
    slopes = {"kl": q - p, "ce": q - onehot, "mixed": q - p + weight * (q - onehot)}[name] / 8
    assert np.allclose(found.gradient.numpy(), slopes @ head.numpy().T, atol=1e-12)


@pytest.mark.parametrize("assignment", ["relative_depth", "r2"])
def test_training_tells_of_each_map_that_is_solved(
    torch_models: dict[str, TorchModel], tmp_path: Path, assignment: str
) -> None:
    """Wide maps take minutes, in which nothing else is to be seen. What they read is as was asked;
    equal to the device's they are in test_training_families."""
    told: list[tuple[str, float | None]] = []

    @contextlib.contextmanager
    def show(text: str, total: float | None) -> Iterator[Any]:
        yield lambda *done: told.append((text, total))

    made = training(torch_models, tmp_path / "t", assignment=assignment, steps=0)
    with shown(SimpleNamespace(phase=show)):
        config = translator_folder.read_config(made.run())
    plain = linear_config(made.source, made.target).assignment
    assert (config.assignment == plain) == (assignment == "relative_depth")
    assert config.provenance["assignment"] == assignment
    maps = 2 * len(made.target.geometry.layers)
    assert told.count(("solving the maps", maps)) == maps
    assert told.count(("reading the samples", made.plan.fit_samples)) == made.plan.fit_samples


def same_result(first: Path, second: Path) -> bool:
    """Whether two trainings have the same curve and the same maps, bit by bit."""
    logs = [log_of(out) for out in (first, second)]
    maps = [translator_folder.read(out)[1].arrays for out in (first, second)]
    same = (np.array_equal(array, maps[1][name]) for name, array in maps[0].items())
    return logs[0] == logs[1] and all(same)


RATES = (1e-3, 1e-2)


@pytest.fixture(scope="module")
def unbroken(torch_models: dict[str, TorchModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of two rates, looked at every second step, from start to end."""
    out = tmp_path_factory.mktemp("unbroken") / "t"
    return training(torch_models, out, learning_rates=RATES).run()


def test_a_signal_stops_a_training_that_then_goes_on(
    torch_models: dict[str, TorchModel], unbroken: Path, tmp_path: Path
) -> None:
    """After six conversations of stage 1, in the fourth step of stage 2."""
    handler = signal.getsignal(signal.SIGTERM)
    stream, warnings = Signalled(6 + 7, signal.SIGTERM), []
    first = training(torch_models, tmp_path / "t", RATES, stream=stream, warn=warnings.append)
    with pytest.raises(SystemExit):
        first.run()
    assert signal.getsignal(signal.SIGTERM) is handler
    stopped = f"stopped; {tmp_path / 't'}.partial keeps the work for the same command"
    assert warnings[-1] == stopped and len(warnings) == 2
    assert len(stream.drawn) == 6 + 2 * 4
    rest = training(torch_models, tmp_path / "t", RATES, stream=stream)
    assert same_result(rest.run(), unbroken)
    assert stream.drawn == [*range(6), *range(12)]  # no conversation was read twice


def interrupted(
    models: dict[str, TorchModel], out: Path, monkeypatch: Patch, **options: Any
) -> None:
    """A training that is killed as it writes its result."""
    with monkeypatch.context() as patch:
        patch.setattr(
            translator_folder, "write", lambda *a, **o: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            training(models, out, steps=2, **options).run()


def test_resuming_with_other_settings_is_refused(
    folders: Folders, torch_models: dict[str, TorchModel], tmp_path: Path, monkeypatch: Patch
) -> None:
    def added(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] += np.float32(0.01)

    out = tmp_path / "t"
    interrupted(torch_models, out, monkeypatch)
    for steps in (4, 0):
        with pytest.raises(ValueError, match=f"steps was 2, is {steps}"):
            training(torch_models, out, steps=steps).run()
    with pytest.raises(ValueError, match="norm was 'frobenius', is 'sink_4'"):
        training(torch_models, out, steps=2, norm="sink_4").run()
    other = dataclasses.replace(
        training(torch_models, out, steps=2), settings={"data": ["b.jsonl"]}
    )
    with pytest.raises(ValueError, match=r"data was None, is \['b.jsonl'\]"):
        other.run()
    # Another checkpoint under the same name.
    source = dataclasses.replace(torch_models["narrow"], name=torch_models["dense"].name)
    with pytest.raises(ValueError, match="source's geometry was '.*', is '.*source's norms was"):
        training(torch_models | {"dense": source}, out, steps=2).run()
    # Of one name and shape and of the same norms, as where a LoRA was fused into a folder.
    for role, name in (("source", "dense"), ("target", "wide")):
        old, place = torch_models[name], altered(folders[name], tmp_path / role, weights=added)
        fused = torch_model.load(str(place), dtype=torch.float32)
        fused = dataclasses.replace(fused, name=old.name)
        assert fused.spec() == old.spec() and fused.projections == old.projections
        with pytest.raises(ValueError, match=f"settings .{role}'s weights was "):
            training(torch_models | {name: fused}, out, steps=2).run()
    state = tmp_path / "t.partial" / "stage2.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:100])
    with pytest.raises(ValueError, match="stage2.safetensors is damaged, or of another"):
        training(torch_models, out, steps=2).run()
    state.write_bytes(whole)
    same = copy.deepcopy(torch_models["dense"].model)
    again = dataclasses.replace(torch_models["dense"], model=same)
    training(torch_models | {"dense": again}, out, steps=2).run()
    assert not (tmp_path / "t.partial").exists()


def poison_first_run(monkeypatch: Patch) -> None:
    """From its sixth conversation on, the first translator seen gets no number as gradient."""
    learn, calls = gradients.conversation_loss, []

    def poisoned(target: Any, translator: TorchTranslator, *rest: Any, **options: Any) -> Any:
        loss = learn(target, translator, *rest, **options)
        if options["scale"] and translator is (calls or [translator])[0]:
            calls.append(translator)
            if len(calls) > 5:
                translator.tensors["keys.0.weight"].grad[0, 0] = math.nan
        return loss

    monkeypatch.setattr(gradients, "conversation_loss", poisoned)


def test_a_training_that_diverges_writes_nothing_and_a_lower_rate_goes_on(
    torch_models: dict[str, TorchModel], tmp_path: Path, monkeypatch: Patch
) -> None:
    """By a gradient, and by a rate that overflows while its numbers are finite."""
    out = tmp_path / "t"
    with monkeypatch.context() as patch:
        poison_first_run(patch)
        with pytest.raises(KVLingoError, match=r"diverged.*0.01 at step 3; .*lower --lr"):
            training(torch_models, out).run()
    monkeypatch.setattr(ClosedForm, "run", None)  # stage 1 is not worked out again
    message = r"diverged.*3e\+36 at step 2; stage 1 is kept: give a lower --lr"
    with pytest.raises(KVLingoError, match=message):
        training(torch_models, out, (3e36,), keep_every=0.0).run()
    assert not out.exists()
    training(torch_models, out, (1e-3,)).run()
    assert [line["step"] for line in log_of(tmp_path / "t")] == [0, 2, 4, 6]
    assert all(np.isfinite(a).all() for a in translator_folder.read(out)[1].arrays.values())


NO_ROOM = OSError(28, "No space left on device")
NO_ROOM_WRAPPED = SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("name", "what", "error"),
    [
        ("initial", "stage 1", NO_ROOM_WRAPPED),
        ("stage2", "step 3", NO_ROOM),
        ("translator", "the translator t", NO_ROOM),
    ],
    ids=str,
)
def test_a_full_disk_keeps_what_was_kept_before(
    torch_models: dict[str, TorchModel],
    unbroken: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    name: str,
    what: str,
    error: Exception,
) -> None:
    save = checkpoints.save_file

    def full(tensors: Any, path: Path, metadata: dict[str, str]) -> None:
        step = json.loads(metadata["facts"]).get("step")
        if path.name.startswith(name) and step in (None, 3, 4):
            path.write_bytes(b"half")
            raise error
        save(tensors, path, metadata)

    def no_room(*arguments: Any, **options: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full)
        if name == "translator":
            patch.setattr(translator_folder, "write", no_room)
        with pytest.raises(KVLingoError, match=f"the disk is full: {what} could not be kept in"):
            training(torch_models, tmp_path / "t", RATES, keep_every=0.0).run()
    assert not list(tmp_path.rglob("*.tmp"))
    assert same_result(training(torch_models, tmp_path / "t", RATES).run(), unbroken)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_are_fair_and_cover_everything(size: int) -> None:
    rng = np.random.default_rng(size)
    costs = (10 ** rng.uniform(1, 4, 16)).astype(int).tolist()
    shares = [Group(rank, size).share(costs) for rank in range(size)]
    assert sorted(i for share in shares for i in share) == list(range(16))
    loads = [sum(costs[i] for i in share) for share in shares]
    # The largest load of longest-first is within 4/3 of the best, which is at least this.
    assert max(loads) <= 4 / 3 * max(max(costs), math.ceil(sum(costs) / size))


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """Eighty small conversations of two questions each."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(80):
        words = [" ".join(rng.choice(list("abcdefgh"), 9)) for _ in range(4)]
        turns = [
            {"role": role, "content": f"{number} {text}"}
            for role, text in zip(("user", "assistant") * 2, words, strict=True)
        ]
        lines.append(json.dumps({"messages": turns}))
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def arguments(folders: Folders, data: Path, *more: str) -> list[str]:
    pair = ["--source", str(folders["dense"]), "--target", str(folders["wide"])]
    small = {"fit_samples": "4", "held_out": "3", "batch-size": "2", "dtype": "float32"}
    if "mlp" in more:  # which has no closed form
        del small["fit_samples"]
    if ("--steps", "0") in itertools.pairwise(more):  # no stage 2
        del small["held_out"], small["batch-size"]
    given = [word for name, value in small.items() for word in ("-c", f"{name}={value}")]
    return ["train", *pair, "--data", str(data), *given, *more]


def test_the_command_trains_a_folder_that_imports(
    folders: Folders, jsonl: Path, tmp_path: Path, store: Path, capsys: Printed
) -> None:
    out = str(tmp_path / "t")
    options = ["--out", out, "--steps", "3", "--lr", "1e-4,1e-3", "-c", "val_every=1"]
    assert run(arguments(folders, jsonl, *options, "--json", "-")) == 0
    said = capsys.readouterr()
    assert f"wrote {out}: held-out KL" in said.err
    record = json.loads(said.out)
    assert record["kind"] == "train" and record["config"]["learning_rates"] == [1e-4, 1e-3]
    assert [line["step"] for line in record["results"]["curve"]] == [0, 1, 2, 3]
    assert record["results"]["provenance"]["held_out"] == 3
    assert [line["step"] for line in log_of(tmp_path / "t")] == [0, 1, 2, 3]
    provenance = translator_folder.read_config(out).provenance
    assert (provenance["data"], provenance["held_out"]) == ([str(jsonl)], 3)
    assert run(["import", out]) == 0
    assert len(list(store.iterdir())) == 1
    files = {path.name: path.read_bytes() for path in Path(out).iterdir()}
    capsys.readouterr()
    assert run(arguments(folders, jsonl, *options)) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{out} is finished already") and second.startswith("grade: ")
    # Another one is not put in its place unasked.
    other = arguments(folders, jsonl, "--out", out, "--steps", "0")
    assert run(other) == 2 and "replace it with --force" in capsys.readouterr().err
    assert files == {path.name: path.read_bytes() for path in Path(out).iterdir()}
    # A later run without stage 2 has no log, and the one that is there is not its own.
    assert run([*other, "--force"]) == 0
    assert f"wrote {out}: stage 1 alone, as --steps is 0\n" in capsys.readouterr().out


def test_an_mlps_stage_1_does_what_it_is_told(
    folders: Folders, jsonl: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Its steps and rates are options; its batch and its looks at held-out data stage 2's."""
    ran: list[Recipe] = []
    whole = distill.Distillation.run

    def spy(self: distill.Distillation, *progress: Any) -> Best:
        ran.append(self.recipe)
        return whole(self, *progress)

    monkeypatch.setattr(distill.Distillation, "run", spy)
    out = tmp_path / "t"
    options = ["--out", str(out), "--kind", "mlp", "-c", "hidden=8", "-c", "gated=false",
               "--steps", "1", "--lr", "1e-4", "-c", "val_every=3", "-c", "stage1_steps=2",
               "-c", "stage1_lr=1e-3,1e-2"]  # fmt: skip
    assert run(arguments(folders, jsonl, *options)) == 0
    first, second = ran
    assert (first.objective, first.steps, first.batch) == ("reconstruction", 2, 2)
    assert (first.learning_rates, first.validate_every) == ((1e-3, 1e-2), 3)
    assert (second.objective, second.steps, second.batch) == ("kl", 1, 2)
    config, weights = translator_folder.read(out)
    assert config.kind == "mlp" and not any("gate" in name for name in weights.arrays)
    assert config.provenance["stage1_rate"] in (1e-3, 1e-2)
    paper = reconstruction(Recipe(), (), 5000)
    assert (paper.steps, paper.batch, paper.learning_rates) == (5000, 8, (3e-3,))
    assert paper == TrainingPlan().stage1_recipe


def test_the_command_sweeps_over_a_rate_that_diverges(
    folders: Folders, jsonl: Path, tmp_path: Path, capsys: Printed
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "kl.png"
    options = ["--out", str(tmp_path / "t"), "--steps", "3", "-c", "val_every=1"]
    options += ["-c", "held_out=20", "--plot", str(plot)]
    assert run(arguments(folders, jsonl, *options, "--lr", "1e-3,3e36")) == 0
    said = capsys.readouterr()
    assert "warning: only 8 of 20 held-out conversations could be" in said.err
    assert "nan" not in said.out and "drew" in said.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    last = log_of(tmp_path / "t")[-1]["held_out"]
    assert last[0] > 0 and last[1] is None
    # Alone, it leaves nothing to write.
    options[1] = str(tmp_path / "wreck")
    assert run(arguments(folders, jsonl, *options, "--steps", "1", "--lr", "3e36")) == 2
    assert "diverged" in capsys.readouterr().err
    assert not (tmp_path / "wreck").exists()
