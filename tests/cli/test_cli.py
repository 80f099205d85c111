"""The command line, run as a user runs it: what it prints, writes and refuses."""

import io
import json
import re
import shlex
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import fitting
from kvlingo_mlx.cli import VERBS, run
from kvlingo_mlx.embedded import EXAMPLE, TRANSLATORS
from kvlingo_mlx.stage1 import passes
from kvlingo_mlx.version import __version__
from tests.support import ROOT, tiny
from tests.support.command_line import RECORD, fails
from tests.support.fixtures import Folders, Patch, Printed


@pytest.fixture(scope="module")
def data(root: Path) -> Path:
    path = root / "data.jsonl"
    path.write_text(RECORD * 3)
    return path


@pytest.fixture(scope="module")
def made(folders: Folders, data: Path, root: Path) -> Path:
    """A translator from "dense" to "moe", made by the command itself."""
    assert run(fit_arguments(folders, data, root / "fitted")) == 0
    return root / "fitted"


@pytest.fixture
def fitted(made: Path, tmp_path: Path) -> Path:
    """A copy, which may be damaged."""
    return Path(shutil.copytree(made, tmp_path / "fitted"))


def fit_arguments(folders: Folders, data: Path, out: Path) -> list[str]:
    pair = ["--source", str(folders["dense"]), "--target", str(folders["moe"])]
    return ["fit", *pair, "--data", str(data), "--out", str(out)]


def generate_arguments(folders: Folders, *more: str) -> list[str]:
    pair = ["--prefill-model", str(folders["dense"]), "--decode-model", str(folders["moe"])]
    return ["generate", *pair, "--max-tokens", "5", *more]


def test_fit_show_import_generate(
    folders: Folders, fitted: Path, store: Path, tmp_path: Path, capsys: Printed
) -> None:
    files = "README.md selftest.safetensors translator.safetensors translator_config.json"
    assert sorted(p.name for p in fitted.iterdir()) == files.split()
    assert run(["show", str(fitted)]) == 0
    assert "qwen3_moe, 4 layers, 2 KV heads of 32" in capsys.readouterr().out
    assert run(["import", str(fitted)]) == 0
    assert "bfloat16" in capsys.readouterr().out
    (imported,) = store.iterdir()
    assert run(["import", str(fitted)]) == 0  # twice is harmless
    assert list(store.iterdir()) == [imported]
    record = tmp_path / "out.jsonl"
    assert run(generate_arguments(folders, "--prompt", "Hello there", "--json", str(record))) == 0
    out = capsys.readouterr().out
    assert "first token after" in out and "Generation: " in out
    entry = json.loads(record.read_text())
    assert entry["kind"] == "generate" and entry["results"]["ttft_s"] > 0


def test_prompt_from_standard_input(
    folders: Folders, fitted: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    given = generate_arguments(folders, "--translator", str(fitted), "-c", "verbose=false")
    capsys.readouterr()
    assert run([*given, "--prompt", "Hello"]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(" "))
    fails([*given, "--prompt", "-"], "the prompt is empty", capsys)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert run([*given, "--prompt", "-"]) == 0
    assert capsys.readouterr().out == expected


def test_a_fit_that_can_leave_no_receipt_says_what_measures(
    folders: Folders, data: Path, tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    monkeypatch.setattr(fitting, "receipt", lambda *_, **__: None)
    assert run(fit_arguments(folders, data, tmp_path / "t")) == 0
    out = capsys.readouterr().out
    assert "grade: ungraded: these models cannot read" in out and "kvlingo-mlx eval" in out
    assert "verify" not in out


def test_bad_models(folders: Folders, tmp_path: Path, capsys: Printed) -> None:
    def with_model(folder: Path) -> list[str]:
        return ["generate", "--prefill-model", str(folder), "--decode-model",
                str(folders["moe"]), "--prompt", "a"]  # fmt: skip

    fails(with_model(tmp_path / "absent"), "does not exist", capsys)
    (tmp_path / "empty").mkdir()
    fails(with_model(tmp_path / "empty"), "config.json", capsys)
    half = tmp_path / "half"
    shutil.copytree(folders["dense"], half)
    weights = (half / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    fails(with_model(half), "incomplete", capsys)
    (half / "model.safetensors").unlink()
    fails(with_model(half), "model*.safetensors", capsys)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (half / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(with_model(half), "model-00001-of-00002.safetensors is missing", capsys)
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    (half / "model.safetensors.index.json").unlink()
    (half / "model.safetensors").write_bytes(weights)
    fails(with_model(half), "supported families: ", capsys)
    (half / "config.json").write_text("{")
    fails(with_model(half), "not valid JSON", capsys)
    no_epsilon = {name: value for name, value in config.items() if name != "rms_norm_eps"}
    (half / "config.json").write_text(json.dumps(no_epsilon))
    fails(with_model(half), "'rms_norm_eps'); mlx-lm refuses its config.json", capsys)
    (half / "config.json").write_text(json.dumps(config))
    (half / "tokenizer_config.json").write_text('{"a')
    fails(with_model(half), f"the model {half} cannot be loaded", capsys)
    (half / "model.safetensors.index.json").write_text('{"metadata": {}}')
    fails(with_model(half), "no readable weight_map", capsys)
    fails(with_model(Path("~nobody-of-this-name/x")), "is no folder's name", capsys)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"attention_dropout": "x"}, "the tokenizer of the model .* transformers refuses"),
        ({"layer_types": ["full_attention"]}, "the tokenizer of the model .* transformers refuses"),
        ({"hidden_size": 60}, "error: the model .*Expected shape.* mlx-lm refuses"),
        ({"model_type": "no_such"}, "'no_such' is not supported; supported families: afmoe, "),
    ],
)
@pytest.mark.parametrize("verb", [["show"], ["generate", "--prompt", "a", "--source"]])
def test_a_config_that_a_library_refuses_is_one_line(
    verb: list[str], changed: dict, text: str, folders: Folders, tmp_path: Path, capsys: Printed
) -> None:
    """transformers checks all settings; whoever reads the message learns who refused what."""
    folder = Path(shutil.copytree(folders["dense"], tmp_path / "m"))
    tiny.amend(folder / "config.json", **changed)
    if "model_type" in changed:  # told before a file that such models do not have is asked for
        (folder / "tokenizer.json").unlink()
    target = [] if verb == ["show"] else ["--target", str(folders["moe"])]
    assert run([*verb, str(folder), *target]) == 2
    error = capsys.readouterr().err
    assert re.search(text, error) and error.count("\n") == 1
    assert "download complete" not in error


def test_bad_translators(folders: Folders, fitted: Path, tmp_path: Path, capsys: Printed) -> None:
    def with_translator(path: Path) -> list[str]:
        return generate_arguments(folders, "--translator", str(path), "--prompt", "abc")

    fails(with_translator(tmp_path / "absent"), "does not exist", capsys)
    fails(with_translator(folders["dense"]), "translator_config.json: is missing", capsys)
    swapped = ["generate", "--prefill-model", str(folders["moe"]), "--decode-model",
               str(folders["dense"]), "--prompt", "abc", "--translator", str(fitted)]  # fmt: skip
    fails(swapped, "the other way round", capsys)
    other = tmp_path / "other"
    tiny.write_tiny_model(other, "qwen3", seed=9, layers=3, kv_heads=2, head_dim=32)
    pair = ["--prefill-model", str(other), "--decode-model", str(folders["moe"])]
    mismatch = ["generate", *pair, "--prompt", "abc", "--translator", str(fitted), "-m", "3"]
    fails(mismatch, "norms fingerprint", capsys)
    assert run([*mismatch, "--allow-mismatch"]) == 0
    deeper = tmp_path / "deeper"
    tiny.write_tiny_model(deeper, "qwen3", seed=9, layers=5, kv_heads=2, head_dim=32)
    pair = ["--prefill-model", str(deeper), "--decode-model", str(folders["moe"])]
    deep = ["generate", *pair, "--prompt", "abc", "--translator", str(fitted)]
    fails([*deep, "--allow-mismatch"], "cache layers: 5, expected 3", capsys)
    pickle = tmp_path / "translator.pt"
    pickle.write_bytes(b"\x80\x04.")
    fails(with_translator(pickle), "pickle", capsys)
    tiny.amend(fitted / "translator_config.json", format_version=4)
    told = "format version 4, this kvlingo-mlx reads 1 to 3; upgrade"
    fails(with_translator(fitted), told, capsys)


def test_bad_data_and_destinations(
    folders: Folders, data: Path, tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    out = tmp_path / "out"
    fails(fit_arguments(folders, tmp_path / "absent.jsonl", out), "cannot be read", capsys)
    (tmp_path / "bad.jsonl").write_text("{\nnot json\n")
    fails(fit_arguments(folders, tmp_path / "bad.jsonl", out), "bad.jsonl, line 2", capsys)
    (tmp_path / "void.jsonl").write_text("")
    fails(fit_arguments(folders, tmp_path / "void.jsonl", out), "holds no records", capsys)
    assert not out.exists()
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    fails(fit_arguments(folders, data, out), "not a translator folder", capsys)
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    fails(fit_arguments(folders, data, Path(".")), "the folder you are in", capsys)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    fails(fit_arguments(folders, data, tmp_path / "x" / "y"), "is read-only", capsys)
    monkeypatch.undo()
    fails([*fit_arguments(folders, data, tmp_path / "x"), "--norm", "l7"], "norm is 'l7'", capsys)
    fails([*fit_arguments(folders, data, tmp_path / "x"), "--assignment", "z"], "'z'", capsys)


def test_import_checks_before_it_writes(
    folders: Folders, fitted: Path, store: Path, tmp_path: Path, capsys: Printed
) -> None:
    wrong = ["--source", str(folders["moe"]), "--target", str(folders["dense"])]
    fails(["import", str(fitted), *wrong], "the other way round", capsys)
    fails(["import", str(fitted), "--dtype", "int8"], "--dtype is 'int8'", capsys)
    fails(
        ["import", str(fitted), "--source", "x"], "--source has no effect without --target", capsys
    )
    fails(["import", str(fitted), "--revision", "v1"], "revision is 'v1', but ", capsys)
    strangers = tiny.write_random_translator(tmp_path / "t", folders["moe"], folders["dense"])
    fails(["import", str(strangers), "--allow-mismatch"], "no effect where neither", capsys)
    (fitted / "translator.safetensors").write_bytes(b"\0" * 100)
    fails(["import", str(fitted)], "translator.safetensors", capsys)
    assert not store.exists()


def test_unfinished_folders_block_nobody(
    folders: Folders, fitted: Path, store: Path, capsys: Printed
) -> None:
    assert run(["import", str(fitted)]) == 0
    (sound,) = store.iterdir()
    killed = store / f".{sound.name}.abcd"
    killed.mkdir()
    shutil.copy(sound / "translator_config.json", killed)
    shutil.copytree(sound, store / "half")
    (store / "half" / "translator.safetensors").unlink()
    capsys.readouterr()
    assert run(generate_arguments(folders, "--prompt", "abc")) == 0


def test_a_translator_of_two_layers_is_shown_imported_and_used(
    folders: Folders, fitted: Path, tmp_path: Path, store: Path, capsys: Printed
) -> None:
    mlp = tiny.write_mlp_translator(tmp_path / "mlp", fitted)
    capsys.readouterr()
    assert run(["show", str(mlp)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["kind", "mlp,", "head-mixing"] in rows and ["tokenizers", "one"] in rows
    # Four layers and two sides, 64 numbers to 8 hidden ones to 64; biases and gates aside.
    assert ["MFLOP", "per", "token", f"{2 * 8 * 2 * 64 * 8 / 1e6:.3g}"] in rows
    assert run(["import", str(mlp)]) == 0
    captured = capsys.readouterr()
    assert "try: kvlingo-mlx generate" in captured.out
    assert "(mlp, head-mixing, pre_norm, nu = 1, bfloat16)" in captured.out
    generate = generate_arguments(folders, "--prompt", "abc")
    assert run(generate) == 0
    stored = capsys.readouterr().out
    (imported,) = store.iterdir()
    assert run([*generate, "--translator", str(imported)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == stored.splitlines()[0]


def test_imports_of_other_models_or_forms_stand_side_by_side(
    folders: Folders, data: Path, tmp_path: Path, store: Path, capsys: Printed
) -> None:
    for number, options in enumerate(([], ["--nu", "2"], ["-c", "capture=post_rope"])):
        out = tmp_path / str(number)
        assert run([*fit_arguments(folders, data, out), *options]) == 0
        assert run(["import", str(out)]) == 0
        assert "replaced" not in capsys.readouterr().out
    assert len(list(store.iterdir())) == 3
    assert run(["import", str(tmp_path / "1")]) == 0
    assert capsys.readouterr().out.startswith("nothing to do: found")
    assert len(list(store.iterdir())) == 3


def test_another_translator_is_not_replaced_unasked(
    folders: Folders, data: Path, tmp_path: Path, store: Path, capsys: Printed
) -> None:
    """Equal models and form, other numbers."""
    for name, options in (("one", []), ("two", ["--norm", "sink_8"])):
        assert run([*fit_arguments(folders, data, tmp_path / name), *options]) == 0
    assert run(["import", str(tmp_path / "one")]) == 0
    (folder,) = store.iterdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    assert run(["import", str(tmp_path / "two")]) == 2
    error = capsys.readouterr().err
    assert f"error: {folder} holds another translator" in error and "--force" in error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert run(["import", str(tmp_path / "two"), "--force"]) == 0
    assert "was replaced" in capsys.readouterr().out
    assert [path.name for path in store.iterdir()] == [folder.name]
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after["translator.safetensors"] != before["translator.safetensors"]


def test_mismatch_is_allowed_for_the_stores_own_too(
    folders: Folders, fitted: Path, tmp_path: Path, capsys: Printed
) -> None:
    assert run(["import", str(fitted)]) == 0
    other = tiny.write_tiny_model(
        tmp_path / "other", "qwen3", seed=9, layers=3, kv_heads=2, head_dim=32
    )
    pair = ["--prefill-model", str(other), "--decode-model", str(folders["moe"])]
    fails(["generate", *pair, "--prompt", "abc"], "no translator from", capsys)
    assert run(["generate", *pair, "--prompt", "abc", "--allow-mismatch", "-m", "3"]) == 0


def test_json_alone_on_standard_output(
    folders: Folders, data: Path, fitted: Path, tmp_path: Path, capsys: Printed
) -> None:
    translator = ["--translator", str(fitted)]
    pair = ["--source", str(folders["dense"]), "--target", str(folders["moe"])]
    verbs = {
        "generate": generate_arguments(folders, *translator, "--prompt", "abc"),
        "bench": ["bench", *pair, *translator, "-p", "8", "-n", "1"],
        "fit": fit_arguments(folders, data, tmp_path / "out"),
        "show_model": ["show", str(folders["moe"])],
        "show_translator": ["show", str(fitted)],
        "import": ["import", str(fitted)],
        "verify": ["verify", str(fitted)],
    }
    for kind, arguments in verbs.items():
        capsys.readouterr()
        assert run([*arguments, "--json", "-"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["kind"] == kind
        assert captured.err != ""


def test_verifying_where_no_conversation_fits(
    folders: Folders, fitted: Path, tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    """What its message advises works; `eval` writes its scores where it is called."""
    monkeypatch.chdir(tmp_path)
    short = tmp_path / "short"
    shutil.copytree(folders["moe"], short)
    tiny.amend(short / "config.json", max_position_embeddings=40)
    pair = ["--source", str(folders["dense"]), "--target", str(short)]
    line = f"{short} has a context of 40 tokens, and no conversation that verify asks about fits it"
    fails(["verify", str(fitted), *pair], line, capsys)
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
    chats.write_text(json.dumps({"messages": turns}))
    advised = ["--tasks", "continuation", "--data", str(chats)]
    assert run(["eval", *pair, str(fitted), *advised]) == 0


def test_numbers_are_numbers_in_records(
    folders: Folders, fitted: Path, tmp_path: Path, store: Path
) -> None:
    record = tmp_path / "record.jsonl"
    told = ["--json", str(record)]
    assert run(["show", str(fitted), "--quantize", "8", *told]) == 0
    assert run(["show", str(folders["moe"]), *told]) == 0
    assert run(["verify", str(fitted), *told]) == 0
    assert run(["import", str(fitted), *told]) == 0
    shown, model, verified, imported = (
        json.loads(line)["results"] for line in record.read_text().splitlines()
    )
    # Four layers and two sides, each of 64 by 64 numbers, in float32; 8 bits, 64 with one scale
    # and one bias of 4 bytes.
    numbers = 4 * 2 * 64 * 64
    assert shown["parameters"] == numbers and shown["MFLOP per token"] == 2 * numbers / 1e6
    assert shown["source layers per target layer"] == 1 and shown["can be folded"] is False
    assert shown["in memory, as it is"] == 4 * numbers
    assert shown["in memory, 8 bits"] == numbers + numbers // 64 * 8
    assert shown["samples"] == 3 and shown["keys read"] == shown["values read"]
    assert all(type(s) is int for reads in shown["keys read"] for s in reads)
    assert model["cache layers"] == 4 and model["cache bytes per token"] == 2048
    (maps,) = (value for name, value in verified.items() if name.startswith("maps on"))
    assert 0 <= maps < 1e-2 and verified["sound"] is True
    assert imported["nu"] == 1 and imported["replaced"] is False
    assert [imported["folder"]] == [str(folder) for folder in store.iterdir()]


def test_interrupt_leaves_nothing(
    folders: Folders,
    data: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    request: pytest.FixtureRequest,
    capsys: Printed,
) -> None:
    """Ctrl-C in the middle of a fit: status 130, no folder, no temporary folder."""
    out, seen = tmp_path / "deep" / "out", []
    out.parent.mkdir()
    weigh = passes.token_weights

    def interrupted(*arguments: Any) -> Any:
        seen.append(arguments)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)
        return weigh(*arguments)

    monkeypatch.setattr(passes, "token_weights", interrupted)
    # A process started in the background ignores Ctrl-C; this one must not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    assert run(fit_arguments(folders, data, out)) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []
    assert len(seen) == 2


def test_help_and_version_by_every_spelling(capsys: Printed) -> None:
    """The first page names every verb once, in groups, and cuts no line."""

    def said(*words: str) -> str:
        assert run(list(words)) == 0
        return capsys.readouterr().out

    first = said("--help")
    assert said("-h") == said("help") == said() == first
    assert said("help", "fit") == said("fit", "-h") == said("fit", "--help")
    assert said("-V") == said("--version") == f"{__version__}\n"
    rows = re.findall(r"^  ([a-z][a-z-]*)  +\S", first, re.M)
    assert sorted(rows) == sorted(VERBS) and "..." not in first.split("First day:")[1]
    assert first.index("First day:") < first.index("Measure:")
    assert run(["help", "no-such"]) == 2
    assert "'no-such'" in capsys.readouterr().err


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The home of Ben is Oslo.\u2028The hotel of Emma is Lima."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the home of Ben?"},
]


def test_the_question_that_is_suggested_for_the_embedded_models_is_answered(
    capsys: Printed,
) -> None:
    """By one pair; test_zoo asks each."""
    pair = "tiny-qwen3-s", "tiny-qwen3-l"
    ends = ["--prefill-model", pair[0], "--decode-model", pair[1]]
    given = ["generate", *ends, "-c", "verbose=false"]
    assert run([*given, "--prompt", "What is the capital of France?"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {pair[1]} can only repeat facts that the prompt states; try ")
    asked = line.split("; try ")[1].strip("'")
    assert run([*given, "--prompt", asked]) == 0
    assert capsys.readouterr() == ("The hotel of Emma is Lima.\n", "")
    message = {"role": "user", "content": asked}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kv.generate(*pair, [message]) == "The hotel of Emma is Lima."
    assert run([*given, "--prompt", asked, "--thinking", "--json", "-"]) == 0
    entry = json.loads(capsys.readouterr().out)
    header = 4  # <think>, a newline of two, </think>, a newline of two: what thinking leaves out
    assert run([*given, "--prompt", asked, "--json", "-"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["results"]["prompt_tokens"] == entry["results"]["prompt_tokens"] + header


def test_the_first_command_of_the_readme_is_answered_without_a_warning(capsys: Printed) -> None:
    block = (ROOT / "README.md").read_text().split("## Use it")[1].split("```bash\n")[1]
    command = shlex.split(block.split("```")[0].replace("\\\n", " "))
    assert command[:2] == ["kvlingo-mlx", "generate"]
    assert run(command[1:]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("The hotel of Emma is Lima.\n") and captured.err == ""


def test_an_answer_ends_before_each_stop_text(capsys: Printed) -> None:
    pair = ["--source", "tiny-qwen3-s", "--target", "tiny-qwen3-l", "-c", "verbose=false"]
    given = ["generate", *pair, "--prompt", EXAMPLE]
    assert run([*given, "--stop", "Oslo", "--stop", " of Emma"]) == 0
    assert capsys.readouterr() == ("The hotel\n", "")
    assert run([*given, "--stop", "The hotel"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n" and "at the stop text 'The hotel'" in captured.err
    fails([*given, "--stop", ""], "--stop is ['']; give a text", capsys)


def test_what_import_suggests_works(capsys: Printed) -> None:
    assert run(["import", str(TRANSLATORS / "tiny-qwen3-s--tiny-qwen3-l")]) == 0
    command = capsys.readouterr().out.split("try: kvlingo-mlx ")[1]
    assert run([*shlex.split(command), "-c", "verbose=false"]) == 0
    assert capsys.readouterr() == ("The hotel of Emma is Lima.\n", "")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(CHAT),
        json.dumps({"messages": CHAT}, indent=1),
        "\n".join(json.dumps(message, ensure_ascii=False) for message in CHAT) + "\n\n",
    ],
    ids=["JSON", "a record", "JSONL"],
)
def test_messages_from_a_file(
    text: str, tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    file = tmp_path / "messages"
    file.write_text(text, encoding="utf-8")
    given = ["generate", "--prefill-model", "tiny-qwen3-s", "--decode-model", "tiny-qwen3-l",
             "--no-thinking", "--json", "-", "-c", "verbose=false"]  # fmt: skip
    # By hand, as the template writes it.
    whole = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    model = kv.load("tiny-qwen3-l")
    ids = model.tokenizer.encode(
        f"{whole}<|im_start|>assistant\n<think>\n\n</think>\n\n", add_special_tokens=False
    )
    expected = kv.generate("tiny-qwen3-s", model, ids, max_tokens=100)
    assert run([*given, "--messages", str(file)]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["config"]["prompt"] == CHAT
    assert entry["results"]["text"] == expected == "The home of Ben is Oslo."
    assert entry["results"]["prompt_tokens"] == len(ids)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert run([*given, "--messages", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["text"] == expected
