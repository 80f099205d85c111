"""lm-eval tasks that several tests of evaluation share."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from tests.support.lm_eval_tasks import words, write_task


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One local task of each kind, and a group of two."""
    folder, rng = tmp_path_factory.mktemp("tasks"), random.Random(1)
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
