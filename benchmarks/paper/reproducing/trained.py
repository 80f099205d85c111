"""The translators that an entry needs, trained as the paper says, each once."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.paper.reproducing.cells import Cell
from benchmarks.paper.reproducing.forms import form, is_translator
from benchmarks.paper.reproducing.models import FEW, PLAIN
from benchmarks.paper.reproducing.record_filter import RecordFilter
from benchmarks.paper.reproducing.work import Work
from benchmarks.paper.training import jobs, paper_pairs
from kvlingo_mlx.embedded import bundled
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.tokenization.records import open_source
from kvlingo_mlx.training import command_line

PLAN = ("fit_samples", "held_out", "hidden")
FIRST = (42, 56)  # the seeds at which the paper swept; other seeds train at the rate found there


@dataclass(frozen=True, order=True)
class Wanted:
    """One translator: its models by the paper's names, its form and its seed."""

    source: str
    target: str
    form: str
    seed: int

    def folder(self, work: Work, names: tuple[str, str]) -> Path:
        """Where it is kept; ``names`` are those of the models that are used."""
        parts = [*names, self.form, *(["text"] if self.plain else [])]
        if not self.form.startswith("closed"):
            parts.append(str(self.seed))
        return work.room / "translators" / "--".join(parts)

    @property
    def plain(self) -> bool:
        """Whether it is trained on windows of plain text, as between base models."""
        return self.source.endswith(PLAIN)

    @property
    def swept(self) -> bool:
        """Whether its rate is to be swept, since the paper swept it and does not state it."""
        found = form(self.form)
        told = found.recipe.get("learning_rates") or found.recipe.get("steps") == 0
        return not told and not paper_pairs.is_stated(self.source, self.target, found.plan)

    @property
    def first(self) -> Wanted | None:
        """The translator at whose rates this one is trained; None if it has its own."""
        if self.form == "mixing_mlp":
            return replace(self, form="head_wise_mlp")
        return replace(self, seed=FIRST[0]) if self.swept and self.seed not in FIRST else None


def wanted(cell: Cell) -> list[Wanted]:
    """The translators of a cell, one for each seed; none for other readings."""
    if not is_translator(cell.who) or cell.what in ("compute", "mean"):
        return []
    return [Wanted(*cell.models, cell.who, seed) for seed in cell.seeds or (42,)]


def needed(cell: Cell, work: Work) -> list[Wanted]:
    """The translators of a cell in this run, which may have fewer seeds than the paper."""
    return wanted(cell)[: work.size.seeds]


def trained(work: Work, pair: tuple[str, str], one: Wanted) -> Path:
    """The folder of a translator; it is trained unless it is finished or given.

    Args:
        work: The run.
        pair: The small and the large model by the paper's names.
        one: The translator.

    Raises:
        ValueError: The room holds it, trained in another way.
        Exception: Whatever a training raises.
    """
    names = _ends(work.models.names(pair), pair, one)
    folder = one.folder(work, names)
    given = None if work.given is None else work.given / folder.name
    if given is not None and (given / translator_folder.CONFIG_FILE).exists():
        work.used[one] = given
        return given
    work.used[one] = folder
    source, target = (work.models.place(name) for name in names)
    form_of = form(one.form)
    options = command_line.Options(
        source=source,
        target=target,
        data=work.training_data(one.plain),
        device=work.device,
        seed=one.seed,
        plain_text=one.plain,
        accepts=english(work, one.plain),
        max_prefix=_smaller(form_of.stream.get("max_prefix"), work.size.max_prefix),
        max_continuation=work.size.answer,
    )
    plan, recipe, stage1 = settings(work, one)
    if one.first is not None and work.size.sweeps:
        made = translator_folder.read_config(trained(work, pair, one.first)).provenance
        recipe |= {"learning_rates": (made["learning_rate"],), "sweep": False}
        if stage1 is not None:
            stage1["rates"] = (made["stage1_rate"],)
    if work.tiny and plan["nu"] is not None:
        plan["nu"] = _smaller(plan["nu"], FEW.get(names[0]))
    facts = {n: v for n, v in vars(options).items() if n not in ("device", "accepts")}
    # Known by what they are, so that a room and its models can move.
    facts |= {"source": names[0], "target": names[1], "data": [_known(d) for d in options.data]}
    facts["english"] = english(work, one.plain).english
    asked = {"options": facts, "plan": plan, "recipe": recipe, "stage1": stage1}
    asked["models"] = files = {name: work.models.files(name) for name in names}
    if _is_done(folder, asked):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    heard = command_line.Listeners(
        lambda stage, report: work.heard.progress(f"{folder.name}: {stage}"),
        work.heard.warn,
        lambda text: None,
    )
    work.heard.progress(f"training {folder.name}")
    whole = jobs.plan_of(options, plan, recipe, stage1)
    # A receipt is measured on the bundled conversations.
    count = bundled.COUNT if work.size.receipts else 0
    with mock.patch.object(bundled, "COUNT", count):
        jobs.start(options, whole, str(folder), heard, work.processes)
    files |= {name: work.models.files(name) for name in names}  # which may have been fetched
    work.write(str(_asked_file(folder).relative_to(work.room)), json.dumps(asked) + "\n")
    return folder


@cache
def _known(data: str) -> str:
    """Data by the digest of their files, and their weight; a name of the Hub as it is."""
    unweighted = data.rpartition("@")[0] or data
    if not any(Path(name).expanduser().exists() for name in (data, unweighted)):
        return data
    source, weight = open_source(data)
    return source.digest + f"@{weight:g}" * (weight != 1)


def english(work: Work, plain: bool = False) -> RecordFilter:
    """What a training reads: of the paper's data, the English subset."""
    return RecordFilter(english=not (work.tiny or work.data or plain))


def _asked_file(folder: Path) -> Path:
    """Where it is kept what a translator was trained by, so that no model is opened to compare."""
    return folder.with_name(f"{folder.name}.json")


def _is_done(folder: Path, asked: dict[str, Any]) -> bool:
    """Whether a translator is there, trained as it is asked for now.

    Raises:
        ValueError: It was trained in another way.
    """
    file = _asked_file(folder)
    if not (file.exists() and (folder / translator_folder.CONFIG_FILE).exists()):
        return False
    wanted = json.loads(json.dumps(asked))
    # A room of before says nothing of models' files; nor can those be compared that are not here.
    kept = {**wanted, **json.loads(file.read_text(encoding="utf-8"))}
    wanted["models"] = {n: f or kept["models"].get(n) for n, f in wanted["models"].items()}
    parts = [name for name in wanted if kept[name] != wanted[name]]
    if not parts:
        return True
    raise ValueError(
        f"{folder} was trained with other {' and '.join(parts)}; give what was given then, name "
        "another --room, or remove that folder"
    )


def settings(
    work: Work, one: Wanted
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """The plan, the recipe and an MLP's first stage, as ``jobs.plan_of`` takes them."""
    found, size = form(one.form), work.size
    plan = {"nu": None, "norm": None, **found.plan}
    plan |= {name: value for name, value in size.training.items() if name in PLAN}
    if plan["nu"] is not None:
        plan["nu"] = _smaller(plan["nu"], size.nu)
    recipe = {"learning_rates": (), **found.recipe}
    recipe |= {name: value for name, value in size.training.items() if name not in PLAN}
    if size.steps is not None and recipe.get("steps") != 0:
        recipe["steps"] = size.steps
    if one.swept and size.sweeps:
        recipe["sweep"] = True
    stage1 = None
    if plan.get("kind") == "mlp":
        stage1 = {"steps": 5000 if size.steps is None else size.steps, "rates": found.stage1_rates}
    return plan, recipe, stage1


def _ends(names: tuple[str, str], pair: tuple[str, str], one: Wanted) -> tuple[str, str]:
    """The names of the source and the target that are used."""
    used = dict(zip(pair, names, strict=True))
    return used[one.source], used[one.target]


def _smaller(asked: int | None, most: int | None) -> int | None:
    """The smaller of two limits, of which either may be missing."""
    known = [limit for limit in (asked, most) if limit is not None]
    return min(known, default=None)
