"""Tasks of lm-eval on local files, one of each kind."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

WORDS = "the you and use is of an other hero on in it at re ion".split()


def words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(low, high)))


def write_task(folder: Path, name: str, records: Sequence[dict], **config: Any) -> None:
    """A task file of the user's, as lm-eval's documentation has it, and its data."""
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(json.dumps(record) for record in records))
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **config,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))


def write_tiny_tasks(folder: Path) -> Path:
    """One local task of each kind, and a group of two."""
    rng = random.Random(1)
    choices = [
        {"question": words(rng, 4, 30), "options": [words(rng, 1, 6) for _ in range(3)],
         "answer": rng.randrange(3)}
        for _ in range(6)
    ]  # fmt: skip
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True}
               for name in ("acc", "acc_norm")]  # fmt: skip
    choice = {"output_type": "multiple_choice", "doc_to_text": "{{question}}\nAnswer:",
              "doc_to_choice": "options", "doc_to_target": "answer",
              "metric_list": metrics}  # fmt: skip
    write_task(folder, "tiny_choice", choices, **choice)
    write_task(folder, "tiny_other", choices[:4], **choice)
    group = {
        "group": "tiny_group",
        "task": ["tiny_choice", "tiny_other"],
        "aggregate_metric_list": [
            {"metric": "acc", "aggregation": "mean", "weight_by_size": True},
            {"metric": "acc_norm", "aggregation": "mean", "weight_by_size": False},
        ],
    }
    (folder / "tiny_group.yaml").write_text(yaml.safe_dump(group))
    write_task(
        folder, "tiny_words", [{"text": words(rng, 4, 30), "last": words(rng, 2, 5)}] * 2
        + [{"text": words(rng, 4, 30), "last": words(rng, 1, 5)} for _ in range(4)],
        output_type="loglikelihood", doc_to_text="{{text}}", doc_to_target="{{' ' + last}}",
        metric_list=[{"metric": "perplexity", "aggregation": "perplexity",
                      "higher_is_better": False},
                     {"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )  # fmt: skip
    write_task(
        folder, "tiny_answers", [{"text": words(rng, 4, 30), "target": "6"} for _ in range(5)],
        output_type="generate_until", doc_to_text="{{text}}", doc_to_target="{{target}}",
        generation_kwargs={"until": ["6", "use", "\n\n"], "max_gen_toks": 16},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )  # fmt: skip
    write_task(
        folder, "tiny_texts", [{"text": words(rng, 4, 40)} for _ in range(5)],
        output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity", "aggregation": "weighted_perplexity",
                      "higher_is_better": False}],
    )  # fmt: skip
    return folder


QUAC = {
    "dialogue_id": "d1", "wikipedia_page_title": "Daffy Duck", "section_title": "Origin",
    "background": "A duck.", "context": "Daffy first appeared in 1937. CANNOTANSWER",
    "questions": ["When did he appear?", "Who drew him?"], "turn_ids": ["d1_q#0", "d1_q#1"],
    "answers": {"texts": [["in 1937", "Daffy first appeared in 1937"], ["CANNOTANSWER"]],
                "answer_starts": [[21], [0]]},
    "orig_answers": {"texts": ["first appeared in 1937", "CANNOTANSWER"],
                     "answer_starts": [6, 30]},
}  # fmt: skip
MT_BENCH = [
    {"task": "CM", "id": 7, "history": [{"user": f"u{i}", "bot": f"b{i}"} for i in range(4)]},
    {"task": "MR", "id": 8, "history": [{"user": "1+1?", "bot": "It is 2."}]},
]


def offline(folder: Path, patch: pytest.MonkeyPatch, own: str | None = None) -> None:
    """No network, data sets in a folder of the tests' own, and of lm-eval's own tasks a folder.

    Its thousands need not be indexed.
    """
    import datasets
    import huggingface_hub
    import lm_eval.tasks.manager as theirs

    from kvlingo_mlx.evaluation.harness import task_loading

    tasks = folder / "none" if own is None else Path(theirs.__file__).parent / own
    patch.setattr(theirs, "__file__", str(tasks / "manager.py"))
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    for module in (datasets.config, huggingface_hub.constants):
        patch.setattr(module, "HF_HUB_OFFLINE", True)
    task_loading._manager.cache_clear()
