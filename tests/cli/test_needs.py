"""Options and arguments that would do nothing are refused: by one table, over all pairs in it.

Every argument of every public function has a kind, and every row of the table is tried in each
state of what it names.
"""

import functools
import importlib
import inspect
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kvlingo_mlx.backend import mx

import pytest
from typer.core import TyperCommand

import kvlingo_mlx as kv
from kvlingo_mlx import arguments
from kvlingo_mlx.arguments import FUNCTIONS, KINDS
from kvlingo_mlx.cli import MOVED, VERBS
from kvlingo_mlx.cli.config import GROUPS, is_key, key_of, spelled
from kvlingo_mlx.engine.conversation import ReplyOptions
from kvlingo_mlx.engine.generation import GenerateOptions
from kvlingo_mlx.engine.sampling import DecodingOptions
from kvlingo_mlx.folding.decoding import FoldedOptions
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode, rendering
from kvlingo_mlx.options import Need
from tests.support import tiny
from tests.support.command_line import COMMANDS, NEEDS, PAPER, fails, run
from tests.support.fixtures import Models, Patch, Printed

# Texts that stand for the states of an option; others are tried with TEXTS.
TEXTS = ("x", "x.json")
STATES = {
    "kind": ("linear", "mlp"),
    "objective": ("kl", "ce", "mixed"),
    "tasks": ("continuation", "needles", "gsm8k", "repliqa", "recall"),
    "table_name": ("quant", "moe-switch", "all", "healing", "memory-budget"),
    "strategy": ("native", "accelerator"),
    "assignment": ("x.json", "relative_depth", "r2"),
    "task_data": ("quac=x", "gsm8k=x"),
    "suite": ("paper", "base", "paper:gsm8k", "base:boolq"),
    "switch_at": ("prompt", "context"),
    "device": ("mlx", "cuda"),
    "turns": ("quac", "multichallenge"),
    "baselines": ("hidden", "droidspeak"),
    "to": ("veloxquant",),
    "heal": ("idle", "interleaved"),
}
KEYS = {
    verb: command.callback.options.KEYS
    for verb, command in COMMANDS.items()
    if command.callback.options.KEYS
}
ROWS = sorted({(verb, option) for verb, needs in NEEDS.items() for need in needs
               for option in need.options.split()})  # fmt: skip


def annotation(verb: str, name: str) -> str:
    """What a verb's options say of one of them: int, say."""
    room = "benchmarks.paper.commands" if verb.startswith(PAPER) else "kvlingo_mlx.cli"
    file = "import_" if verb == "import" else verb.removeprefix(PAPER).replace("-", "_")
    module = importlib.import_module(f"{room}.{file}")
    hint = get_args(inspect.signature(module.command).parameters[name].annotation)[0]
    return next((kind.__name__ for kind in (int, float) if kind in (hint, *get_args(hint))), "str")


def words(verb: str, parameter: Any) -> list[list[str]]:
    """The ways to type a parameter of a verb: not at all, and with several values."""
    if parameter.param_type_name == "argument":
        return [["x"]]
    name = parameter.opts[0]
    if is_key(parameter):
        texts = ("true", "false") if parameter.is_flag else texts_of(verb, parameter)
        twice = [["-c", f"{key_of(parameter)}=a=x", "-c", f"{key_of(parameter)}=b=y"]]
        ways = [["-c", f"{key_of(parameter)}={text}"] for text in texts]
        return [[], *ways, *(twice if parameter.multiple else [])]
    if parameter.is_flag:
        return [[], [name], *([parameter.secondary_opts[0]] for _ in parameter.secondary_opts)]
    ways = [[name, text] for text in texts_of(verb, parameter)]
    twice = [[name, "a=x", name, "b=y"]] if parameter.multiple else []
    return ([] if parameter.required else [[]]) + ways + twice


def texts_of(verb: str, parameter: Any) -> tuple[str, ...]:
    """Values of an option that stand for its states."""
    return {"int": ("0", "1", "3"), "float": ("0", "0.5")}.get(
        annotation(verb, parameter.name),
        STATES.get(f"{verb} {parameter.name}", STATES.get(parameter.name, TEXTS)),
    )


def partners(verb: str, option: str) -> set[str]:
    """What an option needs, and what that needs."""
    found: set[str] = set()
    new = {option}
    while new:
        needs = [n for n in NEEDS.get(verb, ()) if new & set(n.options.split())]
        new = {name for need in needs for name in need.partner.split()} - found - {"sampler"}
        found |= new
    return found


def starts(verb: str, option: str) -> Iterator[list[str]]:
    """Command lines with an option typed, in every state of its partners."""
    known = {p.name: p for p in COMMANDS[verb].params}
    others = partners(verb, option) - {option}
    needed = [words(verb, p)[0] for n, p in known.items()
              if p.required and n not in {option, *others}]  # fmt: skip
    typed = [way for way in words(verb, known[option]) if way]
    mine = typed if option in partners(verb, option) else typed[-1:]
    for way, *ways in itertools.product(mine, *(words(verb, known[p]) for p in sorted(others))):
        yield [verb, *itertools.chain(*needed, *ways), *way]


@pytest.fixture
def begun(monkeypatch: Patch) -> None:
    """Verbs end where they would begin."""
    monkeypatch.setattr(TyperCommand, "invoke", lambda self, ctx: 0)


@pytest.mark.parametrize(("verb", "option"), ROWS, ids=[" ".join(row) for row in ROWS])
def test_every_pair(verb: str, option: str, begun: None, capsys: Printed) -> None:
    """For each of its rows an option is refused in some state of the partners, in a line that names
    both; in another state it is taken."""
    errors, taken = [], False
    for line in starts(verb, option):
        capsys.readouterr()
        if run(line) == 0:
            taken = True
            continue
        errors.append(capsys.readouterr().err)
        assert errors[-1].startswith("error: ") and errors[-1].count("\n") == 1
        assert " no effect " in errors[-1], errors[-1]
    assert taken
    known = {p.name: p for p in COMMANDS[verb].params}
    needs = (n for n in NEEDS[verb] if option in n.options.split() and n.partner != "sampler")
    for need in needs:
        both = [(spelled(known[n]),) if is_key(known[n])
                else (*known[n].opts, *known[n].secondary_opts)
                for n in (option, need.partner.split()[0])]  # fmt: skip
        assert any(all(any(n in e for n in names) for names in both) for e in errors), need


PAIR = ["--source", "/none", "--target", "/none"]


TRAIN = ["train", *PAIR, "--data", "/none", "--out", "/none"]


def test_a_value_equal_to_the_default_counts_where_it_is_typed(capsys: Printed) -> None:
    fails([*TRAIN, "-c", "hidden=2048"], "hidden has no effect with --kind linear", capsys)
    fails(TRAIN, "/none", capsys)  # and the defaults themselves are no fault


def test_the_tables_of_groups_and_keys_name_options() -> None:
    """Each once, and those that there are."""
    every = {p.name for command in COMMANDS.values() for p in command.params}
    grouped = [name for names in GROUPS.values() for name in names.split()]
    assert len(grouped) == len(set(grouped)) and set(grouped) <= every
    for verb, names in KEYS.items():
        assert set(names.split()) <= {p.name for p in COMMANDS[verb].params}


@pytest.fixture
def asked(monkeypatch: Patch) -> list[dict[str, Any]]:
    """What verbs were asked, where they would begin."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(TyperCommand, "invoke", lambda self, ctx: found.append(dict(ctx.params)))
    return found


@pytest.mark.parametrize("verb", KEYS)
def test_a_key_is_read_as_its_flag_is(
    verb: str, asked: list[dict[str, Any]], tmp_path: Path, capsys: Printed
) -> None:
    """From KEY=VALUE, TOML and JSON alike; and typed as a flag."""
    more = ["a=x", "b=y"] if verb in ("chat", "serve") else []
    for parameter in COMMANDS[verb].params:
        if not is_key(parameter):
            continue
        key = key_of(parameter)
        kind = annotation(verb, parameter.name)
        value: Any = True if parameter.is_flag else {"int": 1, "float": 0.5}.get(kind, "x.json")
        shown = json.dumps(value)
        partner = [w for n in partners(verb, parameter.name) for w in setting(verb, n)]
        line = [verb, *more, *required(verb), *partner]
        begun = len(asked)
        (tmp_path / "c.json").write_text(f'{{"{key}": {shown}}}')
        (tmp_path / "c.toml").write_text(f"{key.replace('_', '-')} = {shown}\n")
        typed = [parameter.opts[0], *([] if parameter.is_flag else [str(value)])]
        given = str(value).lower() if parameter.is_flag else value
        files = (tmp_path / "c.json", tmp_path / "c.toml")
        for words in (*(["--config", str(f)] for f in files), ["-c", f"{key}={given}"], typed):
            capsys.readouterr()
            if run([*line, *words]):
                assert " no effect " in capsys.readouterr().err  # of its partners, tested above
        same = [{**found, "config": None} for found in asked[begun:]]
        assert all(found == same[0] for found in same)


def required(verb: str) -> list[str]:
    known = COMMANDS[verb].params
    return [w for p in known if p.required for w in words(verb, p)[0]]


def setting(verb: str, name: str) -> list[str]:
    """A way to type a partner so that most options have an effect."""
    give = {"kind": "mlp", "objective": "mixed", "kv_bits": "8", "draft_model": "x",
            "heal": "interleaved", "guard": "32"}  # fmt: skip
    parameter = next(p for p in COMMANDS[verb].params if p.name == name)
    if name not in give:
        return []
    return ["-c", f"{name}={give[name]}"] if is_key(parameter) else [parameter.opts[0], give[name]]


def test_a_flag_goes_over_a_file(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    """And the later of two files over the earlier; required options may be in a file, too."""
    (one := tmp_path / "1.toml").write_text('data = ["x", "y"]\nsteps = 1\nlr = [1e-4, 3e-4]\n')
    (two := tmp_path / "2.toml").write_text("steps = 2\nbatch-size = 3\nout = 'z'")
    files = ["--config", str(one), "--config", str(two)]
    assert run(["train", "A", "B", *files, "--batch-size", "4"]) == 0
    found = asked[0]
    assert (found["source"], found["target"], found["steps"], found["batch_size"]) == (
        "A", "B", 2, 4)  # fmt: skip
    assert (found["data"], found["lr"]) == (["x", "y"], "0.0001,0.0003")


@pytest.mark.parametrize("verb", ["generate", "pair", "fit", "train", "tune", "eval", "bench"])
def test_two_models_may_stand_alone(
    verb: str, asked: list[dict[str, Any]], capsys: Printed
) -> None:
    """The same as by their options; one, three or both ways are refused."""
    needed = required(verb)
    assert run([verb, "A", "B", *needed]) == run([verb, *PAIR, *needed]) == 0
    first, second = asked
    assert (first["source"], first["target"]) == ("A", "B")
    assert {**first, "source": "/none", "target": "/none"} == second
    if verb != "eval":  # whose further words are translators
        fails(
            [verb, "A", "B", "C", *needed], f"`{verb}` is for two models, and found A, B, C", capsys
        )
        fails(
            [verb, "A", "B", "--source", "C", *needed], "found A, B, --source C; give --so", capsys
        )


def test_models_of_a_chat_and_a_server_may_stand_alone(asked: list[dict[str, Any]]) -> None:
    for verb in ("chat", "serve"):
        assert run([verb, "A", "b=B", "--model", "c=C"]) == 0
        assert asked[-1]["model"] == ["A", "b=B", "c=C"] and not asked[-1]["models"]


def public() -> dict[str, Callable[..., Any]]:
    """What users call by name: functions, and what our classes offer."""
    found: dict[str, Callable[..., Any]] = {}
    for name in kv.__all__:
        value = getattr(kv, name)
        if inspect.isfunction(value):
            found[name] = value
    for cls in (kv.Conversation, kv.Translator):
        for name, member in inspect.getmembers_static(cls):
            function = getattr(member, "__func__", member)
            shown = not name.startswith("_") or (cls is kv.Conversation and name == "__init__")
            if shown and inspect.isfunction(function):
                found[f"{cls.__name__}.{name}".removesuffix(".__init__")] = function
    return found


PUBLIC = public()
# They take states, or a server's request, not what users type.
INNER = """
    Translator.build Translator.above Translator.linear_map Conversation.reply_in_steps
    Conversation.restore
""".split()
# What functions check themselves, because they accept many types.
ACCEPT_MANY = ("prompt", "tokens", "message", "messages", "prompt_cache")
FUNCTION_ROWS = [(name, need, option) for name, needs in FUNCTIONS.items() for need in needs
                 for option in need.options.split()]  # fmt: skip


def parameters(name: str) -> list[inspect.Parameter]:
    every = inspect.signature(PUBLIC[name]).parameters.values()
    return [p for p in every if p.kind is not p.VAR_KEYWORD and p.name not in ("self", "cls")]


def names_of(name: str) -> set[str]:
    """The names of a function's arguments, and of the options that it takes by a TypedDict."""
    own = {"stream_generate": GenerateOptions, "folded_stream_generate": FoldedOptions}
    own["Conversation.stream_reply"] = ReplyOptions
    taken = own.get(name, DecodingOptions)
    return {p.name for p in parameters(name)} | set(get_type_hints(taken))


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - set(INNER)))
def test_every_argument_is_checked(name: str) -> None:
    for parameter in parameters(name):
        assert parameter.name in KINDS or parameter.name in ACCEPT_MANY
    if parameters(name):
        assert hasattr(PUBLIC[name], "__wrapped__"), "decorate it with @checked"


class LanguageModelDouble:
    """Known by the name of its class alone."""


LanguageModelDouble.__name__ = "LanguageModel"
AssignmentDouble = type("Assignment", (), {})
LOADED, LISTED = LanguageModelDouble(), AssignmentDouble()
SAMPLE: dict[str, Any] = {
    "translators": ["x"], "switching": "reprefill", "eager": False, "on_missing": "reprefill",
    "offload": "disk", "native_layers": 2, "allow_mismatch": True, "lazy": True, "revision": "x",
    "shard": "tensor",
    "quantize": 8, "enable_thinking": True, "first_token": "source", "translator": "x",
    "top_p": 0.5, "min_p": 0.1, "temperature": 0.5, "heal": "interleaved", "heal_share": 0.4,
    "guard": 32, "on_doubt": "reread",
}  # fmt: skip
PARTNERS: dict[str, tuple[Any, ...]] = {
    "path_or_hf_repo": ("x", LOADED), "kv_bits": (None, 8), "draft_model": (None, "x"),
    "prompt": ("x", [{"role": "user", "content": "x"}]), "assignment": (None, "r2", LISTED),
    "models": ({"a": "x"}, {"a": "x", "b": "y"}), "prefill": (None, "a"),
    "strategy": ("native", "accelerator"), "guard": (0, 32), "prompt_cache": (None, []),
    "switching": ("reprefill", "alternated"), "heal": (None, "interleaved"),
    "sampler": (None, len), "temperature": (None, 0, 0.5),
    "tokens": ([1, 2], [{"role": "user", "content": "x"}]),
}  # fmt: skip
NEEDED: dict[str, Any] = {
    "prefill_model": "x", "decode_model": "x", "source": "x", "target": "x", "samples": [],
    "prompt": [], "tokens": [], "models": {"a": "x", "b": "y"}, "name": "a", "message": "x",
    "path_or_hf_repo": "x",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "need", "option"),
    FUNCTION_ROWS,
    ids=[f"{f} {o} {n.partner}" for f, n, o in FUNCTION_ROWS],
)
def test_every_pair_of_arguments(name: str, need: Need, option: str) -> None:
    """As for options; the function itself is a stub, since it must not begin."""
    real = PUBLIC[name].__wrapped__  # type: ignore[attr-defined]
    stub = arguments.checked(functools.wraps(real)(lambda *args, **options: "begun"))
    required = {p.name: NEEDED[p.name] for p in parameters(name) if p.default is p.empty}
    own = () if "." not in name and name != "Conversation" else (None,)
    told = set()
    rows = [row for row in FUNCTIONS[name] if option in row.options.split()]
    assert need in rows
    partners = sorted({p for row in rows for p in row.partner.split()} - {option})
    for states in itertools.product(*(PARTNERS[partner] for partner in partners)):
        states = dict(zip(partners, states, strict=True))
        given = {**required, **states, option: SAMPLE.get(option, 7)}
        try:
            told.add(stub(*own, **given))
        except ValueError as error:
            assert " no effect " in str(error)
            mine = option in str(error).split(" has no effect")[0]
            told.add("refused" if mine else "a partner refused")
    assert {"begun", "refused"} <= told


def test_defaults_passed_on_are_no_fault(models: Models, tmp_path: Path) -> None:
    """A program that hands every option through, as servers do."""
    pair = models["dense"], models["moe"]
    made = kv.load_translator(tiny.write_random_translator(tmp_path / "t", *(m.path for m in pair)))
    own = {p.name for p in parameters("stream_generate")}
    passed = {n: arguments.DEFAULTS.get(n) for n in names_of("stream_generate") - own}
    text = kv.generate(*pair, "abc", **{**passed, "translator": made, "max_tokens": 3})
    assert text == kv.generate(*pair, "abc", translator=made, max_tokens=3)


def test_native_layers_of_stored_translators(models: Models, store: Path) -> None:
    """Told when the conversation is made, not when its second model answers."""
    pair = {"a": models["dense"], "b": models["moe"]}
    store.mkdir(parents=True)
    tiny.write_random_translator(store / "t", models["moe"].path, models["dense"].path)
    shallow, deep = (len(models[name].attentions) for name in ("dense", "moe"))
    assert shallow < deep
    with pytest.raises(ValueError, match=f"give a number from 0 to {shallow}"):
        kv.Conversation(pair, native_layers=deep)
    kv.Conversation(pair, native_layers=shallow)
    with pytest.raises(ValueError, match="has no tuned native layers"):
        kv.Conversation(pair, native_layers="auto")


NOWHERE = Path(os.devnull) / "none"  # not even root can write there

WRONG: tuple[Any, ...] = (
    "5", "", 5, -1, 5.5, None, True, {}, {"a": 1}, [], [None], b"x", NOWHERE, object(),
    (1, 2), 1 + 2j, float("nan"), "x\0y",
)  # fmt: skip


@pytest.fixture(scope="module")
def calls(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By name: a function, and arguments with which it works."""
    root = tmp_path_factory.mktemp("calls")
    pair = {"prefill_model": models["dense"], "decode_model": models["wide"]}
    ends = models["dense"].path, models["wide"].path
    made = kv.load_translator(tiny.write_random_translator(root / "t", *ends))
    asked = {**pair, "prompt": "ab", "translator": made, "max_tokens": 1}
    records = [{"text": "one two three four five six seven eight nine ten"}]
    by_name = {"a": models["dense"], "b": models["wide"]}

    def talk(**options: Any) -> Any:
        return kv.Conversation(**options).reply("a", "hi", max_tokens=1)

    def reply(**options: Any) -> Any:
        return kv.Conversation(by_name, [made], on_missing="reprefill").reply(**options)

    saved = kv.Conversation(by_name, [made]).save(root / "c")
    return {
        "load": (kv.load, {"path_or_hf_repo": str(ends[0])}),
        "load_translator": (kv.load_translator, {"path_or_hf_repo": str(root / "t")}),
        "zoo": (kv.zoo, {"name": "tiny-qwen3-s"}),
        "generate": (kv.generate, asked),
        "stream_generate": (lambda **options: list(kv.stream_generate(**options)), asked),
        "hand_over": (kv.hand_over, {**pair, "tokens": [1, 2, 3], "translator": made}),
        "folded_generate": (kv.folded_generate, {**pair, "prompt": "a", "max_tokens": 1}),
        "folded_hand_over": (kv.folded_hand_over, {**pair, "tokens": [3]}),
        "fit": (kv.fit, {"source": models["dense"], "target": models["wide"], "samples": records}),
        "Conversation": (talk, {"models": by_name}),
        "Conversation.stream_reply": (reply, {"name": "a", "message": "hi", "max_tokens": 1}),
        "Conversation.resume": (kv.Conversation.resume, {"folder": saved, "models": by_name}),
        "Translator.save": (made.save, {"folder": root / "copy"}),
    }


@pytest.mark.parametrize("name", [
    "load", "load_translator", "zoo", "generate", "hand_over", "folded_generate",
    "folded_hand_over", "fit", "Conversation", "Conversation.stream_reply", "Conversation.resume",
    "Translator.save",
])  # fmt: skip
def test_wrong_types_are_told(name: str, calls: Any, tmp_path: Path) -> None:
    """A dozen wrong values for each argument: a result, or our own error in one line."""
    os.chdir(tmp_path)
    function, good = calls[name]
    own = [p.name for p in parameters(name)]
    names = sorted(names_of("stream_generate")) if name == "generate" else own
    told = 0
    for argument, value in itertools.product(names, WRONG):
        try:
            function(**{**good, argument: value})
        except (ValueError, kv.KVLingoError, OSError) as error:
            told += 1
            assert "\n" not in str(error) and str(error), (argument, value)
        except Exception as error:
            raise AssertionError(f"{name}({argument}={value!r}): {error!r}") from error
    assert told > 3 * len(names)


def test_the_words_of_wrong_types(models: Models) -> None:
    """Found, expected."""
    pair = models["dense"], models["moe"]
    for call, told in (
        (lambda: kv.generate(*pair, "x", max_tokens="5"), "max_tokens is '5'; give a whole number"),
        (lambda: kv.generate(*pair, "x", allow_mismatch="no"), "'no'; give True or False"),
        (lambda: kv.generate(*pair, "x", sampler=0.7), "sampler is 0.7; give a function"),
        (lambda: kv.generate(pair, pair[1], "x"), "what kvlingo_mlx.load returns"),
        (lambda: kv.generate(*pair, "x", translator=pair), "what kvlingo_mlx.load_translator ret"),
        (lambda: kv.fit(*pair, {"text": "x"}), "give a list of records, or a JSONL file's path"),
        (lambda: kv.load_translator(pair[0]), "give a translator's folder or Hub id"),
        (lambda: kv.Conversation([pair[0]]), "give a dict of models by name"),
        (lambda: kv.fit(*pair, [{"text": "x"}], nu=1.5), "nu is 1.5; give a whole number"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert told in str(caught.value)


def test_parts_of_text_are_one_text(models: Models) -> None:
    """As OpenAI's API writes them: in a prompt, in a conversation and in records; other parts are
    refused by name."""
    model = models["dense"]
    if not model.tokenizer.has_chat_template:
        pytest.skip("the tiny model has no template")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    whole, parted = ([{"role": "user", "content": c}] for c in ("one two", parts))
    assert encode(model, parted) == encode(model, whole)
    assert rendering(model, parted).text == rendering(model, whole).text
    answers = [kv.Conversation({"a": model}).reply("a", m, max_tokens=3) for m in (whole, parted)]
    assert answers[0] == answers[1]
    image = [
        {"role": "user", "content": [parts[0], {"type": "image_url", "image_url": {"url": "x"}}]}
    ]
    for refuse in (
        lambda: kv.generate(model, model, image, strategy="native"),
        lambda: kv.Conversation({"a": model}).reply("a", image),
    ):
        with pytest.raises(ValueError, match="has a part of type 'image_url'; models read text"):
            refuse()


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize("way", ["generate", "native", "draft", "reply"])
def test_a_processor_is_blamed_for_its_own(
    models: Models, tmp_path: Path, way: str, value: float
) -> None:
    """NaN, or nothing left to choose; while damaged weights are still told as such."""
    source, target = models["dense"], models["wide"]

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.full(logits.shape, value)

    def ask(target: LanguageModel, **options: Any) -> None:
        folder = tmp_path / f"t{len(list(tmp_path.iterdir()))}"
        tiny.write_random_translator(folder, models["dense"].path, models["wide"].path)
        if way == "reply":
            talk = kv.Conversation({"a": source, "b": target}, on_missing="reprefill")
            talk.reply("b", "hello", **options)
            return
        more = {"generate": {"translator": folder}, "native": {"strategy": "native"},
                "draft": {"strategy": "native", "draft_model": source}}[way]  # fmt: skip
        kv.generate(source, target, "hello", max_tokens=4, **more, **options)

    with pytest.raises(ValueError, match="one of logits_processors returns NaN"):
        ask(target, logits_processors=[spoil])
    damaged = kv.load(target.path)
    damaged.model.model.norm.weight = damaged.model.model.norm.weight * float("nan")
    with pytest.raises(kv.KVLingoError, match="weights are damaged"):
        ask(damaged)
    with pytest.raises(ValueError, match="or the weights of .* are damaged"):
        ask(damaged, logits_processors=[lambda tokens, logits: logits])


OF_TWO = [verb for verb in VERBS if {"source", "target"} <= {p.name for p in COMMANDS[verb].params}]
TYPED = {
    "fit": ["--data", "x", "--out", "y"], "train": ["--data", "x"], "import": ["t"],
    "verify": ["t"], "eval": ["t"], "export": ["t", "--to", "veloxquant", "--out", "y"],
}  # fmt: skip


@pytest.mark.parametrize("verb", OF_TWO)
def test_source_and_target_in_every_verb(verb: str, asked: list[dict[str, Any]]) -> None:
    """By either spelling, and none that is made up."""
    needed = TYPED.get(verb, [])
    for source in ("--source", "--prefill-model"):
        for target in ("--target", "--decode-model"):
            assert run([verb, *needed, source, "A", f"{target}=B"]) == 0
    assert len(asked) == 4 and all(each == asked[0] for each in asked)
    assert (asked[0]["source"], asked[0]["target"]) == ("A", "B")
    assert run([verb, *needed, "--from", "A", "--to", "B"]) == 2 and len(asked) == 4


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_what_the_papers_tables_alone_need_is_in_a_checkout(
    old: str, new: str, asked: list[dict[str, Any]], capsys: Printed
) -> None:
    """What is typed of old is refused in a line that says what to type; its beginning is not."""
    verb, *rest = old.split()
    for typed in (rest, ["=".join(rest)] if len(rest) == 2 else rest):
        assert run([verb, "--source", "a", *typed, "x"]) == 2 and not asked
        error = capsys.readouterr().err
        where = "\n" if new.startswith("kvlingo-mlx") else " in a checkout"
        assert error.count("\n") == 1 and f"`{old}` is now `{new}`{where}" in error
    assert run(["bench", "--source", "a", "--target", "b"]) == 0 and len(asked) == 1
    if new.startswith("kvlingo-mlx"):
        assert new.split()[1] in COMMANDS
        return
    module, command, *_ = [*new.split()[2:], "reproduce"]
    assert module == "benchmarks.paper" and f"{PAPER}{command}" in COMMANDS
