"""What verbs refuse before they work: one line that says what to type, and nothing is left behind.

A row is what is typed after the words that a group begins with, and a part of the line.
"""

import json
import shlex
from pathlib import Path

import pytest

from kvlingo_mlx.embedded import TRANSLATORS
from tests.support.command_line import fails

ZOO = "--source tiny-qwen3-s --target tiny-qwen3-l"
NOWHERE = "--source /none --target /none"
MESSAGES = "generate --prefill-model tiny-qwen3-s --decode-model tiny-qwen3-l"
OTHER_MACHINE = "h:1 is an address, and a model on another machine can only be"
TALK = [{"role": "user", "content": "say it on"}, {"role": "assistant", "content": "it is on"}]
TEXT = "the sun is up and Anna knows the code of Ben or so they say in Paris today "
# Files that rows name: {talk}, say.
FILES: dict[str, str | bytes] = {
    "talk": json.dumps({"messages": TALK}),
    "unmarked": json.dumps({"messages": TALK, "answers": ["off"]}),
    "talks": "\n".join(json.dumps({"messages": TALK, "n": n}) for n in range(80)),
    "text": '{"text": "one two three"}',
    "short": '{"text": ""}\n{"text": "x"}',
    "mixed": json.dumps({"text": TEXT}) + "\n" + json.dumps({"messages": TALK}),
    "empty": "",
    "nobody": '{"messages": "hi"}',
    "cut": '{"role": "user", "content": "a"}\n{"role"',
    "words": '["hi"]',
    "two": json.dumps([{"messages": TALK}] * 2),
    "bytes": b"\xff\xfe",
    "coqa.jsonl": '{"story": "x", "questions": ["a", "b", "c"], "answers": {"input_text": '
    '["d", "e", "f"], "turn_id": [1, 2, 3]}}',
    "c.toml": "qwertz = 1",
    "list.json": "[1]",
    "null.json": '{"hidden": null}',
    "broken.toml": "hidden =",
    "float.toml": "hidden = 2.5",
}
REFUSED: dict[str, list[tuple[str, str]]] = {
    "train --source {dense} --target {wide} --data {talks}": [
        ("", "--out is missing"),
        ("--out {root}", "is not a translator folder"),
    ],
    "train --source {dense} --target {wide} --data {talks} --out x": [
        ("--lr fast", "--lr is 'fast'"),
        ("--dtype int8", "--dtype is 'int8'"),
        ("-c objective=mse", "objective is 'mse'"),
        ("--nu 9", "nu is 9"),
        ("--steps -5", "--steps is -5; give a whole number, 0 or more"),
        ("--batch-size 0", "--batch-size is 0; give 1 or more"),
        ("--minutes nan", "--minutes is nan; give a number above 0"),
        ("--minutes 0", "--minutes is 0.0; give a number above 0"),
        ("-c packed_share=1.5", "packed_share is 1.5; give a share from 0 to 1"),
        ("-c assignment=best", "assignment is 'best'; give relative_depth, r2"),
        ("-c ridge=-1", "ridge is -1.0; give a number, 0 or more"),
        ("--max-prefix 20000", "--max-prefix is 20000; give 1 to 16384 tokens"),
        ("--seed 99999999999999999999", "--seed is 99999999999999999999; give"),
        ("--device gpu", "--device is 'gpu'; it must be mlx, cuda, cuda:N or cpu"),
        ("--device cuda:99", "--device is cuda:99, but PyTorch finds"),
        ("--steps 0 --plot kl.png", "--plot"),
        ("-c stage1_steps=5", "stage1_steps has no effect with --kind linear,"),
        ("--kind mlp -c stage1_lr=x", "stage1_lr is 'x'; give a number"),
        ("--kind mlp -c stage1_steps=0 --steps 0", "neither stage has steps"),
        ("--kind linear_mlp --steps 0", "are 0, and stage 1 does not train the MLP"),
        ("--kind conv", "kind is 'conv'"),
        ("-c joint=true -c head_mixing=false", "joint is true, expected kind linear"),
        ("-c joint=true -c assignment=r2", "r2 chooses for keys and values apart"),
        ("-c native_layers=99", "native_layers is 99; give 0 to"),
        ("-c objective=ce -c ce_weight=0", "ce_weight has no effect with -c objective=ce"),
        ("-c hiden=2", "--config: unknown key 'hiden'; did you mean hidden?"),
        ("-c {c.toml}", "c.toml: unknown key 'qwertz'; known are "),
        ("-c {list.json}", "list.json holds no keys"),
        ("-c {null.json}", "null.json: hidden is None; give a text"),
        ("-c {broken.toml}", "broken.toml is not valid TOML"),
        ("-c absent.toml", "--config absent.toml cannot be read"),
        ("--kind mlp -c hidden=many", "should be a valid integer"),
        ("--kind mlp -c {float.toml}", "should be a valid integer"),
    ],
    "bench": [
        ("-p 64,1", "--prompt-tokens is '64,1'; give numbers of tokens, 2 or more"),
        ("-p 64,9999", "9999, but the context of tiny-qwen3-s is 2048: give at most"),
        ("-c nu=2", "nu is 2, but it is for random maps, and the stored"),
        ("--quantize 7", "7"),
        ("--quantize 3", "--quantize is '3'; give 8, 4"),
        ("--geometry a:b", "`bench --geometry` is now `python -m benchmarks.paper bench"),
        ("--table quant", "`bench --table` is now `python -m benchmarks.paper bench --table`"),
        ("--source h:1 --target tiny-qwen3-l", OTHER_MACHINE),
    ],
    "'paper bench'": [
        ("--geometry qwen3-4b", "--geometry is 'qwen3-4b'; give SOURCE:TARGET"),
        ("--geometry qwen3-4b:nope", "--geometry names 'nope'; there are qwen3-0.6b, "),
        ("--geometry qwen3-4b:qwen3-8b -c layers=37", "layers is 37; qwen3-4b has 36"),
    ],
    "tune tiny-qwen3-s tiny-qwen3-l --limit 1": [
        ("--native-layers 0,9", "--native-layers is '0,9'; give numbers from 0 to "),
        ("--max-kl -1", "--max-kl is -1.0; give a number, 0 or more"),
        ("--min-recall 95", "--min-recall is 95.0; give a share from 0 to 1"),
        ("--max-kl 1", "is no folder of yours, so nothing can be kept in it"),
        ("--data {unmarked}", "record 1: its last reply does not hold 'off'"),
    ],
    f"eval {ZOO}": [
        ("--native-layers many", " is 'many'; give a number of layers, or 'auto'"),
        ("--baselines droid", "--baselines names 'droid'"),
        ("--tasks needles --lengths 10,99999", "--lengths holds 99999; give "),
        ("--tasks needles --lengths 20", "the needles alone take"),
        ("--tasks needles -c style=odd", "'odd' is no needle style"),
        ("--data absent.jsonl", "absent.jsonl"),
        ("a=absent a=absent", "'a' is taken"),
        ("name=", "names no translator"),
        ("--out absent/x.jsonl", "absent/x.jsonl cannot be written"),
    ],
    f"'paper eval' {ZOO} --tasks continuation": [
        ("--window 9+9", "--window has no effect without --data"),
        ("--data {text} --window 256", "--window is '256'; give two numbers of tokens: 256+64"),
        ("--data {text} --window 40000+960", "40960 tokens, and the shorter of the two contexts"),
        ("--data {short} --window 256+64", "no text of the data has the 320 tokens"),
        ("--data {mixed} --window 2+2",
         "record 2 of the data is a conversation, and window cuts plain"),
    ],
    f"eval {NOWHERE}": [
        (f"--quantize {typed}", f"--quantize is {said}; give 8, 4 or 8,4")
        for typed, said in (("3", "'3'"), ("8,x", "'8,x'"), ("''", "''"))
    ],
    "generate --prefill-model /none --decode-model /none --prompt x": [
        ("--temp nan", "--temp is nan"),
        ("--temp -1", "--temp is -1"),
        ("--max-tokens 0", "--max-tokens is 0"),
        ("--max-tokens -2", "--max-tokens is -2"),
        ("--max-tokens many", "--max-tokens"),
        ("--temp 1 --seed -1", "--seed is -1"),
        ("--temp 1 --seed 99999999999999999999", "--seed is 999"),
        ("--temp 1 --top-p 5", "--top-p is 5.0"),
        ("--temp 1 --top-k -3", "--top-k is -3"),
        ("-c quantize=3", "quantize is 3; give 8 or 4"),
        ("--strategy native --translator t -c native_head=3",
         "--translator, native_head have no effect with --strategy native"),
        ("-c kv_group_size=32", "no effect without --kv-bits; add --kv-bits 8"),
        ("--strategy fast", "--strategy is 'fast'; give accelerator or native"),
        ("--strategy auto", "--strategy is 'auto'; give accelerator or native"),
    ],
    MESSAGES: [
        ("", "give --prompt TEXT, or --messages FILE"),
        ("-p hi --messages {talk}", "leave out one of them"),
        ("--messages none", "No such file"),
        ("--messages {talk} --system-prompt x", "--system-prompt"),
        ("--messages {talk} -c ignore_chat_template=true", "ignore_chat_template"),
        ("--messages {bytes}", "is not UTF-8 text"),
        ("--messages {empty}", "holds no messages"),
        ("--messages {nobody}", "holds 'h'; give messages"),
        ("--messages {cut}", "not JSON (Expecting ':' delimiter: line 2"),
        ("--messages {words}", "holds 'hi'; give messages"),
        ("--messages {two}", "2 conversations"),
        ("--target h:1 --prompt x", OTHER_MACHINE),
        ("--prompt x -c memory_budget=true", "`kvlingo-mlx fit -c capture=post_rope`"),
    ],
    "chat": [
        ("", "no model is given"),
        ("--source A --model a=B", "--source has no effect"),
        ("--target B", "--target has no effect without --source"),
        ("--model a=h:1", OTHER_MACHINE),
        ("--source h:1 --target tiny-qwen3-l", OTHER_MACHINE),
    ],
    "chat --model=a={dense} --model=b={dense}": [
        ("c", "c does not exist"),
        ("--model =c", "give NAME=MODEL"),
        ("--model a=x", "the name 'a' is taken"),
        ("--model auto=x", "a model is named auto"),
        ("--model c=/no/such/folder", "does not exist"),
        ("--use c", "--use is 'c'; give one of a, b"),
        ("--route x", "give FILE.toml, module:function or path/to/file.py:function"),
        ("--native-layers many", " is 'many'; give a number of layers, or 'auto'"),
        ("-c on_missing=skip", "on_missing is 'skip'; give error or reprefill"),
        ("-c offload=4bit", "offload is '4bit'; give 8bit or disk"),
        ("--save /dev/null/x", "--save is '/dev/null/x'; name a folder"),
    ],
    "serve": [
        ("", "no model is given; give NAME=MODEL"),
        ("--model a=x --model a=y", "the name 'a' is taken"),
        ("--model nomodel", "nomodel does not exist; give a model's folder"),
    ],
    "serve --model a={dense}": [
        ("--host no.such.host.invalid --api-key k", "which is not known"),
        ("-c body_limit=some", "body_limit is 'some'; give a number of bytes"),
        ("--config /none.toml", "--config /none.toml cannot be read"),
        ("-c keep_alive=-1", "keep_alive is -1.0; give seconds above 0"),
    ],
    "serve-prefill --source": [
        ("h:1", OTHER_MACHINE),
        ("tiny-qwen3-s --host 0.0.0.0", "host is 0.0.0.0, which others can reach, and no key is"),
        ("tiny-qwen3-s --max-jobs 0", "max_jobs is 0; give 1 or more"),
        ("tiny-qwen3-s --host no.such.host --allow-anyone", "no.such.host, which is not known"),
    ],
    "": [
        (f"fit {ZOO} --data {{text}} --out y", "tokens to fit on, and a map has 128 inputs"),
        ("generate --prompt a", "--source A --target B"),
        ("translate", "translate"),
        ("fit --source h:1 --target tiny-qwen3-l --data {text} --out y", OTHER_MACHINE),
        ("tune --source h:1 --target tiny-qwen3-l --translator t", OTHER_MACHINE),
        ("show absent --quantize 3", "quantize is 3; give 8 or 4"),
        ("show no-such", "give a translator's or a model's folder or Hub id, or a"),
        ("verify no-such", "no-such does not exist; give a translator's folder, a name that"),
        ("show {dense} --quantize 8", "--quantize is for translators"),
        ("verify t --target x", "--target has no effect without --source"),
        ("'paper bench' --batch-sizes 1,2", "--batch-sizes has no effect"),
    ],
    f"'paper eval' {ZOO}": [
        ("--tasks recal", "--tasks names 'recal'; did you mean recall?"),
        ("--tasks mt_bench_101", "a model judges the answers of mt_bench_101; add --judge"),
        ("--tasks quac -c task_data=boolq=x",
         "--task-data has no effect where it names no task of --tasks"),
        ("--tasks quac -c metadata=[1]", "metadata is [1]; give a JSON object"),
        ("--tasks needles --max-tokens 0", "--max-tokens is 0"),
        ("--tasks quac --switch-at end", "--switch-at is 'end'; give one or more of"),
        ("--tasks quac --switch-at trace", "without --thinking no reasoning is written"),
        ("--tasks quac,recall --switch-at context", "recall has no context after"),
    ],
    f"'paper eval' {NOWHERE} --suite": [
        ("paper --judge-prompts x", "without --judge; add --jud"),
        ("papers", "--suite is 'papers'"),
        ("base:squad --task-data quac=x", "names no task"),
        ("paper:ruler --limit 0", "--limit is 0"),
        ("paper:ruler,repliqa", "judges the answers of repliqa; add --judge MODEL"),
        ("paper:repliqa --judge x --judge-prompts none.json", "cannot be read"),
    ],
    f"'paper eval' {ZOO} --turns": [
        ("coqas", "'coqas' has no turns to score; known are coqa, quac, multichallenge"),
        ("coqa:x", "--turns names 'coqa:x'; give coqa, or coqa:J"),
        (",", "give benchmarks, each once"),
        ("multichallenge", "add --judge MODEL"),
        ("coqa --tasks recall", "--tasks has no effect with --turns coqa"),
        ("coqa --baselines reuse", "with --turns give hidden, shuffled or none"),
        ("coqa --task-data coqa={broken.toml}", "broken.toml cannot be read"),
        ("coqa --task-data coqa={coqa.jsonl}", "give --turns coqa:3, or other data"),
        ("coqa:2 --task-data coqa={coqa.jsonl} a={translator}", "give as many of both"),
        ("coqa:2 --task-data coqa={coqa.jsonl} --source {dense}",
         "--turns compares ways that need one"),
    ],
    "'paper analyze' --source {dense} --target {wide}": [
        ("--capture middle", "capture is 'middle'"),
        ("--documents 1", "documents is 1"),
        ("--tokens 63", "tokens is 63; it must be at least 64"),
        ("--hidden 0", "hidden is 0"),
        ("--epochs 0", "epochs is 0"),
        ("--seed -1", "seed is -1"),
        ("--data absent", "cannot be read"),
        ("--json .", "--json is"),
        ("--target tiny-qwen3-l", "the tokenizers of"),
    ],
    "'paper reproduce'": [
        ("", "no label is given"),
        ("fig:main", "has no numbers to reproduce; README.md describes it"),
        ("tab:mla", "found: none (no --models is given), missing: Qwen3-4B-latents, Qwen3-8B-l"),
        ("tab:linearity --judge x", "--judge changes nothing in tab:linearity"),
        ("fig:suite_small_on_mean --room {room}", "a model judges the answers of"),
        ("tab:qwen3sl --items 0", "--items"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def places(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What stands for {names} in rows."""
    root, found = tmp_path_factory.mktemp("files"), {n: folders[n] for n in ("dense", "wide")}
    for name, text in FILES.items():
        found[name] = root / name
        found[name].write_bytes(text if isinstance(text, bytes) else text.encode())
    return found | {
        "translator": TRANSLATORS / "tiny-qwen3-s--tiny-qwen3-l",
        "room": root / "room",
        "root": root,
    }


ROWS = [(begin, more, told) for begin, rows in REFUSED.items() for more, told in rows]


@pytest.mark.parametrize(
    ("begin", "more", "told"), ROWS, ids=[f"{b.split(' ')[0]} {m}".strip() for b, m, _ in ROWS]
)
def test_a_refusal_is_one_line_and_leaves_nothing(
    begin: str, more: str, told: str, places: dict[str, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for part, module in (("--plot", "matplotlib"), ("cuda:99", "torch"), ("'paper", "lm_eval")):
        if part in f"{begin} {more}":
            pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(f"{begin} {more}")
    for name, place in places.items():
        words = [word.replace(f"{{{name}}}", str(place)) for word in words]
    fails(words, told, capsys)
    assert not list(tmp_path.iterdir())
