"""What a message tells a user to type is allowed for the user's pair."""

import ast
import dataclasses
import re
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import command_line, run
from kvlingo_mlx.embedded.bundled import NAME
from kvlingo_mlx.engine import guarding
from kvlingo_mlx.engine.hybrid import native_part
from kvlingo_mlx.evaluation import tuning, verification
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.loading import notes
from kvlingo_mlx.loading.translators import known_by, load_translator
from kvlingo_mlx.making.run import Making
from tests.support import hybrid_models, tiny, two_tokenizers

PACKAGE = Path(kv.__file__).parent
RECEIPT = {"prompts": NAME, "kl": 0.4, "top1": 0.9, "hidden_kl": 1.0}
USELESS = {**RECEIPT, "recall": {"translated": 0.0, "native": 1.0, "hidden": 0.0, "facts": 8}}


def commands(text: str) -> list[list[str]]:
    """The commands that a message advises."""
    return [shlex.split(found)[1:] for found in re.findall(r"`(kvlingo-mlx [^`]*)`", text)]


def faults(words: list[str]) -> list[str]:
    """The verb or the options of a command that do not exist; any verb is VERB."""
    verb, *given = [word.split("=")[0] for word in words]
    if verb in ("VERB", "--version"):
        return []
    if verb not in command_line.commands:
        return [verb]
    known = {o for p in command_line.commands[verb].params for o in (*p.opts, *p.secondary_opts)}
    return [word for word in given if word.startswith("-") and word not in known]


def literals(path: Path) -> list[str]:
    """A file's strings, with a word in the place of what is put into them."""
    inner: set[int] = set()
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(value) for value in node.values}
            parts = (v.value if isinstance(v, ast.Constant) else "VERB" for v in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            found.append(str(node.value))
    return found


def test_every_command_in_the_package_has_its_verb_and_options() -> None:
    texts = [text for path in PACKAGE.rglob("*.py") for text in literals(path)]
    found = [words for text in texts for words in commands(" ".join(text.split()))]
    assert len(found) > 10 and [words for words in found if faults(words)] == []


def test_a_wrong_command_is_found() -> None:
    assert commands("do `kvlingo-mlx tune --bogus` now") == [["tune", "--bogus"]]
    assert faults(["tune", "--bogus"]) and faults(["nothing"])


Writer = Callable[[Path], tuple[Path, Path]]


def of(kind: str, *seeds: tuple[int, int, int]) -> Writer:
    def write(root: Path) -> tuple[Path, Path]:
        one, other = (
            tiny.write_tiny_model(root / f"m {n}", kind, seed=n, layers=layers, kv_heads=heads,
                                  head_dim=width)
            for n, (layers, heads, width) in enumerate(seeds)
        )  # fmt: skip
        return one, other

    return write


def hybrids(root: Path) -> tuple[Path, Path]:
    one, other = (
        hybrid_models.write_hybrid_model(root / f"h{seed}", "qwen3_5", seed=seed,
                                         num_hidden_layers=4)
        for seed in (1, 2)
    )  # fmt: skip
    return one, other


def two(root: Path) -> tuple[Path, Path]:
    return two_tokenizers.write_qwen(root / "qwen"), two_tokenizers.write_mistral(root / "mistral")


PAIRS: dict[str, Writer] = {
    "one tokenizer": of("qwen3", (3, 2, 32), (4, 2, 32)),
    "other heads": of("qwen3", (3, 2, 32), (3, 4, 16)),
    "windows": of("gemma3_text", (4, 2, 32), (4, 2, 32)),
    "hybrids": hybrids,
    "two tokenizers": two,
}


class ReachedError(Exception):
    """The command has passed its checks, and begins to work."""


def reached(*given: Any, **named: Any) -> None:
    raise ReachedError


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands check all that they check, and stop before they work."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "task_of", reached)
    monkeypatch.setattr(verification, "agreement", reached)
    monkeypatch.setattr(Making, "train", reached)


def said(action: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            action()
        except (kv.KVLingoError, ValueError) as error:
            return str(error)
    return "\n".join(str(w.message) for w in caught)


def messages(folder: Path, models: list[Any], receipt: Any) -> list[str]:
    """All that is said of a stored translator with a receipt, and of one that is not there."""
    config, weights = translator_folder.read(folder)
    provenance = {} if receipt is None else {"receipt": receipt}
    config = dataclasses.replace(config, provenance=provenance)
    translator_folder.write(folder, config, weights, overwrite=True)
    found = guarding.Guarded(8, 9.0, 1.0, ("the models are far apart",))
    longer = dataclasses.replace(config, provenance={"longest_prefix": 4})
    return [
        said(lambda: kv.find_translator(models[1], models[0])),  # there is none
        said(lambda: notes.tell_of_grade(config, *known_by(folder))),
        said(lambda: notes.tell_of_length(longer, 99, "T")),
        said(lambda: guarding.check_reference(config)),
        said(lambda: guarding.warn(config, found)),
        said(lambda: native_part(config, "auto")),
        said(lambda: tuning.translator_of(str(folder), *models, False)),
    ]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("receipt", [USELESS, RECEIPT, None], ids=["useless", "some", "none"])
def test_what_is_advised_is_not_refused(
    kind: str, receipt: Any, stopped: None, store: Path, tmp_path: Path
) -> None:
    folders = PAIRS[kind](tmp_path)
    models = [kv.load(folder) for folder in folders]
    folder = store / "mine"
    if kind == "two tokenizers":
        two_tokenizers.write_translator(folder, *folders)
    else:
        hybrid_models.random_translator(models[0], models[1], nu=1).save(folder)
    texts = messages(folder, models, receipt)
    advised = [words for text in texts for words in commands(text) if words[0] != "import"]
    verbs = {words[0] for words in advised}
    assert {"pair"} <= verbs <= {"pair", "tune", "verify"}
    assert ("tune" in verbs) == (kind != "two tokenizers")
    for words in advised:
        words = ["mine" if word == "TRANSLATOR" else word for word in words]
        assert not faults(words)
        with pytest.raises(ReachedError):
            run([*words, "--debug"])
    for option in ("guard", "-c guard", "native_layers", "-c native_layers", "--native-layers"):
        # advised nowhere for two tokenizers
        assert kind != "two tokenizers" or not any(f"give {option}" in text for text in texts)


def test_what_is_not_available_is_not_offered_where_it_is_refused(tmp_path: Path) -> None:
    """The verb in which one is never stands among those to use instead."""
    folder = two_tokenizers.write_translator(tmp_path / "t", *two(tmp_path))
    translator = load_translator(folder)
    text = said(lambda: guarding.check_reference(translator.config))
    assert text.startswith("guard (-c guard) is not available here: the translator from ")
    assert text.endswith(" is between two tokenizers; leave it out") and "use it with" not in text
    assert notes.to_tune(translator.config, None) is None
