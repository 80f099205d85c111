"""A local model that judges answers, and the parsing of its verdicts (appendix "Evaluation data").

Judging reads the result of :func:`kvlingo_mlx.evaluation.harness.running.run`, so the judge may be
loaded after the answering models were released. A reply without a verdict is counted apart; it
never counts as a wrong answer.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.generate import generate

from benchmarks.paper.evaluation.judge_prompts import BRACKETED, TEMPLATES
from kvlingo_mlx.evaluation.error_bars import Mean, over_items
from kvlingo_mlx.evaluation.journal import Responses, key_of
from kvlingo_mlx.loading.models import Model, load
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.reporting.measure import plain

Ask = Callable[[str], str]
RATINGS = (1, 10)
# How LongMemEval's own prompts end; a bare yes or no cannot be told from a malformed reply.
ANSWER_ONLY = re.compile(r"(?i)answer yes or no only\.?\s*$")
NO_ANSWER = "(the response is empty)"


# ---- verdicts ------------------------------------------------------------------------------


def rating(reply: str) -> float | None:
    """The rating in a reply, "Rating: [[7]]"; None unless it is one number from 1 to 10."""
    text = _bracketed(reply)
    if text is None or not re.fullmatch(r"[0-9]{1,2}(\.[0-9]+)?", text):
        return None
    low, high = RATINGS
    return float(text) if low <= float(text) <= high else None


def yes_no(reply: str) -> float | None:
    """1 for [[yes]], 0 for [[no]], None for anything else, including words without brackets."""
    return {"yes": 1.0, "no": 0.0}.get((_bracketed(reply) or "").lower())


def fraction(reply: str) -> float | None:
    """The share in "Facts: [[2/3]]"; None unless it is a valid share of at least one fact."""
    found = re.fullmatch(r"([0-9]{1,3})\s*/\s*([0-9]{1,3})", _bracketed(reply) or "")
    if not found:
        return None
    part, whole = int(found[1]), int(found[2])
    return part / whole if 0 < whole >= part else None


def _bracketed(reply: str) -> str | None:
    """The text in double brackets, if the reply has exactly one such text, perhaps repeated."""
    found = {text.strip() for text in re.findall(r"\[\[([^\[\]]*)\]\]", reply)}
    return found.pop() if len(found) == 1 else None


VERDICTS: dict[str, Callable[[str], float | None]] = {
    "rating": rating,
    "yes_no": yes_no,
    "fraction": fraction,
}


# ---- the judge -----------------------------------------------------------------------------


class Judge:
    """A model that answers judging prompts greedily, with reasoning off.

    Args:
        model: A folder, a Hub id or a loaded model, with a chat template.
        max_tokens: The most tokens of a reply; a reply that is cut off before its verdict has none.
        responses: A file that keeps replies; prompts with a kept reply are not asked again.
    """

    def __init__(
        self, model: Model, *, max_tokens: int = 1024, responses: str | Path | None = None
    ) -> None:
        self.model, self.max_tokens = load(model), max_tokens
        self.responses = Responses(None if responses is None else Path(responses))

    def __call__(self, prompt: str) -> str:
        """The reply to one prompt.

        Raises:
            ValueError: The model has no chat template, or the prompt exceeds its context.
        """
        key = key_of("judge", self.model.weights_fingerprint, self.max_tokens, prompt)
        if key not in self.responses:
            self.responses.add(key, self._reply(prompt))
        return self.responses[key]

    def _reply(self, prompt: str) -> str:
        model = self.model
        tokens = encode(model, [{"role": "user", "content": prompt}], enable_thinking=False)
        model.check_tokens(tokens)
        text = generate(model.model, model.tokenizer, tokens, max_tokens=self.max_tokens)
        end = model.tokenizer.think_end
        return text.rpartition(end)[2] if end else text


def judging(
    make: Callable[[], Ask], prompts: Mapping[str, str] | None = None
) -> Callable[[], Callable[..., dict[str, Any]]]:
    """A judge as :func:`kvlingo_mlx.evaluation.harness.benchmarks.evaluate` takes it."""

    def begin() -> Callable[..., dict[str, Any]]:
        ask = make()
        return lambda run, tell: judge_answers(run, ask, prompts=prompts, progress=tell)

    return begin


def judge_answers(
    results: Mapping[str, Any],
    judge: Ask,
    *,
    prompts: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Have a judge score the answers that need one.

    Args:
        results: The result of ``running.run``, possibly read back from JSON.
        judge: A function from a prompt to a reply, such as a :class:`Judge`.
        prompts: A benchmark's own prompts in place of ours, by their names in
            ``judge_prompts.TEMPLATES``, with the same ``{places}``.
        progress: Called with the number of judged answers and the number of all.

    Returns:
        A copy of ``results``. Each judged item has its score, or None for a reply without a
        verdict, and the reply as ``judgement``. Each judged task has its metric over the verdicts,
        and the number of replies without one as ``malformed``.

    Raises:
        ValueError: As :func:`usable_prompts` has it.
    """
    texts = usable_prompts(prompts or {})
    judged = copy.deepcopy(dict(results))
    tasks = [t for t in judged["tasks"].values() if any(i.get("to_judge") for i in t["items"])]
    total = sum(len(task["items"]) for task in tasks)
    done = 0
    for task in tasks:
        for item in task["items"]:
            _judge_item(item, judge, texts)
            done += 1
            progress(done, total)
        _summarise(task)
    return judged


def _judge_item(item: dict[str, Any], judge: Ask, prompts: Mapping[str, str]) -> None:
    wanted = item["to_judge"]
    template = TEMPLATES[wanted["template"]]
    text = prompts.get(wanted["template"], template.text)
    fields = {**wanted["fields"], "answer": item["answer"].strip() or NO_ANSWER}
    reply = judge(text.format(**fields))
    score = VERDICTS[template.verdict](reply)
    if score is not None and wanted["expected"] == "no":
        score = 1.0 - score
    item["judgement"] = reply
    item["scores"] = {template.metric: score}


# ---- a benchmark's own prompts ---------------------------------------------------------------


def read_prompts(place: str | Path) -> dict[str, str]:
    """A benchmark's own prompts, from a JSON object or a folder with a text file for each.

    Prompts have the names of ``judge_prompts.TEMPLATES``; in a folder ``mt_bench_101/CM`` is
    ``mt_bench_101/CM.txt``.

    Raises:
        ValueError: The place cannot be read, or holds an unknown prompt or one that cannot be used.
    """
    path, found = Path(place), {}
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*.txt") if file.is_file())
            for file in files:
                name = file.relative_to(path).with_suffix("").as_posix()
                found[name] = file.read_text(encoding="utf-8-sig")
        else:
            found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the judge prompts in {place} cannot be read ({error})") from None
    texts = isinstance(found, dict) and all(isinstance(text, str) for text in found.values())
    if not texts or not found:
        raise ValueError(
            f"{place} holds no judge prompts; give a JSON object of names and texts, or a folder "
            "with files such as mt_bench_101/CM.txt"
        )
    return usable_prompts(found)


def usable_prompts(prompts: Mapping[str, str]) -> dict[str, str]:
    """A benchmark's own prompts, each of which asks for a verdict in double square brackets.

    One that asks for a bare yes or no ends, as in the paper, with the request for it in brackets,
    in place of "Answer yes or no only."

    Raises:
        ValueError: A prompt has an unknown name, cannot be filled in, or asks for no verdict that
            can be read.
    """
    found = {}
    for name, text in prompts.items():
        if name not in TEMPLATES:
            raise ValueError(f"no judge prompt is called {name}; there are {', '.join(TEMPLATES)}")
        if TEMPLATES[name].verdict == "yes_no" and "[[" not in text:
            text = f"{ANSWER_ONLY.sub('', text.rstrip()).rstrip()} {BRACKETED}"
        known, places = _places(TEMPLATES[name].text) or set(), _places(text)
        if places is None or "answer" not in places or places - known:
            listed = ", ".join(f"{{{place}}}" for place in sorted(known - {"answer"}))
            raise ValueError(
                f"the judge prompt {name} cannot be filled in: it needs {{answer}}, its other "
                f"places may be {listed}, and other braces are written twice"
            )
        if "[[" not in text:
            form = TEMPLATES[name].text.rpartition("form: ")[2]
            raise ValueError(
                f"the judge prompt {name} asks for no verdict in double square brackets, the only "
                f"one that is read; let it ask for this form: {form}"
            )
        found[name] = text
    return found


def _places(text: str) -> set[str] | None:
    """The names of a prompt's places; None if the prompt is malformed."""
    try:
        return {name for _, name, _, _ in Formatter().parse(text) if name is not None}
    except ValueError:
        return None


def _summarise(task: dict[str, Any]) -> None:
    items = task["items"]
    (metric,) = {name for item in items for name in item["scores"]}
    valid = [item for item in items if item["scores"][metric] is not None]
    task["malformed"] = len(items) - len(valid)
    mean = Mean(math.nan, math.nan, 0)
    if valid:
        mean = over_items([item["scores"][metric] for item in valid])
    task["metrics"] = {metric: plain(mean)}
    task["higher_is_better"] = {metric: True}
