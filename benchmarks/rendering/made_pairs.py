"""The section on the paper's made pairs: latents beside keys and values, and pairs from scratch."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.paper.reproducing.tables import LARGE_TO_SMALL, SMALL_TO_LARGE, tables
from rendering.records import records, sources, table

ARROWS = {LARGE_TO_SMALL: "L to S", SMALL_TO_LARGE: "S to L"}
LATENTS, PLAIN, MIXING = "latents", "keys and values", "mixing"
HEADS = {  # maps, and what a head-wise one is called in the paper's table
    MIXING: "mixing",
    "head-wise": "head-wise",
    "head-wise-mlp": "head-wise MLP, 1x",
    "head-wise-mlp-x4": "head-wise MLP, 4x",
}
TRAINED = ("closed form", "self-distilled")
MODELS, CACHES = ("model", "rank"), ("pair", "direction")  # of one run
TRANSLATORS = ("way", "rank", "maps", "mlp", "direction", "seed")
SIDES = {"keys": "K", "values": "V"}
RANKS = (
    "By rank, with all of a key's numbers turning: the share of the energy of keys and values\n"
    "that latents leave out, as the calibration's singular values tell it and as it is found on\n"
    "other dialogues; KL to the original; the share of {} answers that are right. By the metric\n"
    "of the inputs' covariance, and by a plain SVD of the weights.\n"
)
SAYS = (
    "Tiny models can say whether latents of a given width cross two models as well as the keys\n"
    "and values that they compress, by one recipe and beside controls; they cannot say what of\n"
    "the paper's losses remains at its size, since all that must cross here is which of 144\n"
    "values was told.\n"
)


def made_pairs() -> str:
    """What conversions leave of models, what caches have in common, and what translators keep."""
    found = records("made_pairs")
    if not found:
        return ""
    parts = [
        "## Pairs that the paper made: latents, and models from scratch\n",
        "Converted by `tools/convert_mla.py`, then fine-tuned by `tools/recover_mla.py`; the\n"
        "models that were not converted got the same fine-tune. Those from scratch are made by\n"
        "`tools/pretrain.py`. KL in nats a token. Means over seeds of the data, with the least\n"
        "and the most.\n",
        SAYS,
    ]
    alone = [r for r in found if "model" in r["config"]]
    parts += _conversions()
    for run in _runs(alone, MODELS):
        parts += ["### The models alone\n", _told(run[0]["config"]), _models(run), sources(run)]
    pairs = [r for r in found if "pair" in r["config"]]
    for run in _runs([r for r in pairs if "seed" not in r["config"]], CACHES):
        parts += ["### Two models' caches\n", _on(run[0]["config"]), _caches(run), sources(run)]
    for run in _runs([r for r in pairs if "seed" in r["config"]], TRANSLATORS):
        title = run[0]["config"]["pair"].replace(":", " and ")
        told = _told(run[0]["config"], _mlps(run))
        parts += [f"### {title}, seeds of the data: {_seeds(run)}\n", told]
        if any(r["config"]["way"] == LATENTS for r in run):
            parts += [_as_in_the_paper(run)]
        if len({r["config"]["maps"] for r in run}) > 1:
            parts += [_heads(run)]
        parts += [_conditions(run), sources(run)]
    return "\n".join(parts)


def _conversions() -> list[str]:
    """What ranks, metrics and rotary keys cost models that are not fine-tuned."""
    found = records("converted_mla")
    tried = [run[-1] for run in _runs([r for r in found if not r["config"]["recover"]], ())]
    if not tried:
        return []
    return [
        "### What a conversion costs before any fine-tune\n",
        RANKS.format(tried[0]["config"]["dialogues"]),
        _ranks(tried),
        "Full rank, and fewer numbers of a key turning:\n",
        _rotations(tried),
        sources(tried),
    ]


def _ranks(found: list[dict]) -> str:
    """Both metrics at every rank, with all of a key turning."""
    rows = []
    for record in found:
        tried = record["results"]["rows"]
        whole = max(row["rotary"] for row in tried)
        ways = {(row["rank"], row.get("metric")): row for row in tried if row["rotary"] == whole}
        for rank in sorted(rank for rank, metric in ways if metric == "weights"):
            ours, plain = ways[rank, "covariance"], ways[rank, "weights"]
            rows.append([record["config"]["model"], str(rank), f"{ours['left_out']['told']:.2f} %"])
            for row in (ours, plain):
                rows[-1] += [
                    f"{row['left_out']['found']:.2f} %",
                    f"{row['kl']:.2g}",
                    f"{row['recall']:.2f}",
                ]
    columns = ["model", "rank", "left out, by singular values", "found", "KL", "right",
               "by the weights alone: found", "KL", "right"]  # fmt: skip
    return table(columns, rows)


def _rotations(found: list[dict]) -> str:
    rows = []
    for record in found:
        tried = record["results"]["rows"]
        whole = max(row["rank"] for row in tried)
        for row in (row for row in tried if row["rank"] == whole):
            told = [f"{row['kl']:.2g}", f"{row['recall']:.2f}", f"{row['logits']:.1e}"]
            rows.append([record["config"]["model"], str(row["rotary"]), *told])
    return table(["model", "rotary", "KL", "right", "largest difference of a logit"], rows)


def _runs(found: Iterable[dict], own: Sequence[str]) -> list[list[dict]]:
    """Records by all of their settings but for their ``own``; of equal ones the latest."""
    runs: dict[str, dict[str, dict]] = {}
    for record in found:
        config = record["config"]
        shared = {name: value for name, value in config.items() if name not in own}
        run = runs.setdefault(json.dumps(shared, sort_keys=True), {})
        run[json.dumps(config, sort_keys=True)] = record
    return [list(run.values()) for run in runs.values()]


def _seeds(run: list[dict]) -> str:
    """How many seeds each way has, the fewest and the most."""
    names = [name for name in TRANSLATORS if name not in ("seed", "mlp")]
    ways = Counter(tuple(r["config"][name] for name in names) for r in run)
    return " to ".join(map(str, sorted({min(ways.values()), max(ways.values())})))


def _mlps(run: list[dict]) -> dict | None:
    """How the run's MLPs were made, if it has some."""
    return next((r["config"]["mlp"] for r in run if "mlp" in r["config"]), None)


def _told(config: dict, mlp: dict | None = None) -> str:
    parts = []
    if "recovery_steps" in config:
        parts += [
            f"rotary keys of {config['rotary']}",
            f"{config['recovery_steps']} steps of the fine-tune at {config['recovery_rate']:g}, "
            f"its losses on {config['exchanges']} answers",
        ]
    if "steps" in config:
        steps = f"{config['steps']} steps of {config['batch']} at"
        parts.append(
            f"closed forms of {config['fit_dialogues']} dialogues, nu = {config['nu']}, then "
            f"{steps} {_rates(config['lr'])}"
        )
        if mlp is not None:
            rates = _rates(mlp["mlp_lr"])
            parts.append(f"MLPs: {mlp['mlp_steps']} steps of reconstruction, then {steps} {rates}")
    facts = "judged on {} dialogues of {} to {} facts".format(config["dialogues"], *config["facts"])
    told = "; ".join([*parts, facts])
    return f"{told[0].upper()}{told[1:]}.\n"


def _rates(rates: Sequence[float]) -> str:
    return " or ".join(f"{rate:g}" for rate in rates)


def _on(config: dict) -> str:
    tokens = f"{config['tokens']:,} tokens of {config['documents']} dialogues"
    return (
        f"R2 on held-out dialogues, of {tokens} in all: means over layers. Heads: the share of a\n"
        "source head's map that goes to the target head of the same number, beside chance.\n"
    )


def _caches(run: list[dict]) -> str:
    """R2 and heads of every pair, beside the paper's pair from scratch."""
    rows = []
    for record in run:
        config, results = record["config"], record["results"]
        for side, letter in SIDES.items():
            each, heads = results["sides"][side], results["heads"].get(side)
            told = ""
            if heads is not None and heads["null"][0] < 1:  # more than one head
                told = f"{heads['diagonal']:.3f} ({heads['null'][0]:.3f})"
            fits = [f"{each[kind]:.3f}" for kind in ("linear", "mlp", "rho")]
            pair = config["pair"].replace(":", " and ")
            rows.append([pair, ARROWS[config["direction"]], letter, *fits, told])
    paper = tables()["tab:linearity"]
    for index in range(len(paper.rows)):
        pair, letter = paper.names(index)[-2:]
        if "scratch" in pair:
            linear, mlp, _, rho = paper.values(index)
            rows.append([f"paper, {pair}", ARROWS[LARGE_TO_SMALL], letter,
                         f"{linear:.3f}", f"{mlp:.3f}", f"{rho:.3f}", ""])  # fmt: skip
    return table(["pair", "", "side", "R2 linear", "R2 of an MLP", "rho", "heads"], rows)


def _models(run: list[dict]) -> str:
    rows = []
    for record in run:
        config, results = record["config"], record["results"]
        scores, sizes = results["scores"], results["bytes_per_token"]
        first = "original" if config["rank"] is None else "converted"
        each = [
            f"{scores[first][key]:.{digits}f}, {scores['recovered'][key]:.{digits}f}"
            for key, digits in (("hits", 3), ("kl", 4), ("value_kl", 4))
        ]
        form = _form(config["rank"])
        rows.append([config["model"], form, f"{sizes['recovered']:,}", *each])
    columns = ["model", "caches", "bytes a token", "recall before, after", "KL to the original",
               "on the values"]  # fmt: skip
    return table(columns, rows)


def _form(rank: int | None) -> str:
    return PLAIN if rank is None else f"latents of {rank}"


def _as_in_the_paper(run: list[dict]) -> str:
    """Latents against keys and values in the columns of the paper's table, and its own rows."""
    rows = []
    for rank in dict.fromkeys(r["config"]["rank"] for r in run if r["config"]["rank"] is not None):
        for direction, arrow in ARROWS.items():
            sides = [_those(run, LATENTS, rank, direction), _those(run, PLAIN, None, direction)]
            if all(sides):
                rows.append([f"rank {rank}", arrow, *_compared(sides)])
    paper = tables()["app:tab:mla"]
    for index in range(len(paper.rows)):
        _, budget, way = paper.names(index)
        values = paper.values(index)
        kls = [f"{value:.3f}" for value in values[:4]]
        gains = [
            "{:+.3f} ± {:.3f}, {:+.3f} ± {:.3f}".format(*values[4 + side], *values[6 + side])
            for side in (0, 1)
        ]
        rows.append([f"paper, {budget}", way.replace("→", "to"), *kls, *gains])
    columns = ["", "", "closed form KL, latent", "K/V", "self-distilled KL, latent", "K/V",
               "recall - own native, latent", "K/V"]  # fmt: skip
    note = "The paper's last columns are of MMLU-Pro and ARC-C; its models are Qwen3-4B and 8B.\n"
    return table(columns, rows) + "\n" + note


def _heads(run: list[dict]) -> str:
    """Maps that mix heads against those that do not, above the paper's pair from scratch."""
    rows = []
    for (direction, arrow), (maps, name) in itertools.product(ARROWS.items(), HEADS.items()):
        own = {"direction": direction, "maps": maps}
        if group := [r for r in run if own.items() <= r["config"].items()]:
            kls = [_spread(_values(group, how, "kl"), "{:.3f}") for how in TRAINED]
            rows.append([name, arrow, *kls, _lost(group)])
    paper = tables()["tab:scratchppl"]
    mlps = list(HEADS.values())[2:]
    for index in range(len(paper.rows)):
        _, way, corpus = paper.names(index)
        _, closed, _, trained, *others = (f"{value:.3f}" for value in paper.values(index))
        ways = [
            (MIXING, closed, trained),
            *((name, "", other) for name, other in zip(mlps, others, strict=True)),
        ]
        for name, *gaps in ways:
            rows.append([f"paper, {corpus}: {name}", way.replace("→", "to"), *gaps, ""])
    columns = ["maps", "", "closed form KL", "self-distilled KL", "recall - own native"]
    note = (
        "The paper's are gaps of log perplexity, of its pair from scratch with independent\n"
        "initialisations.\n"
    )
    return table(columns, rows) + "\n" + note


def _lost(group: list[dict]) -> str:
    """Recall by the translator that was trained last, less the target's own."""
    best = next(name for name in reversed(TRAINED) if _values(group, name, "hits"))
    both = (_values(group, name, "hits") for name in (best, "native"))
    return _spread([a - b for a, b in zip(*both, strict=True)], "{:+.3f}")


def _those(run: list[dict], way: str, rank: int | None, direction: str) -> list[dict]:
    own = {"way": way, "rank": rank, "direction": direction}
    return [r for r in run if own.items() <= r["config"].items()]


def _compared(sides: Sequence[list[dict]]) -> list[str]:
    """Both sides' KL of either translator, then what the trained one loses of the target's own."""
    found = []
    for name in TRAINED:
        found += [_spread(_values(side, name, "kl"), "{:.3f}") for side in sides]
    return found + [_lost(side) for side in sides]


def _conditions(run: list[dict]) -> str:
    """Every condition of every way, rank and direction."""
    rows = []
    groups: dict[tuple, list[dict]] = {}
    for record in run:
        config = record["config"]
        key = tuple(config[name] for name in ("way", "rank", "maps", "direction"))
        groups.setdefault(key, []).append(record)
    for (way, rank, maps, direction), group in groups.items():
        form = way if rank is None else _form(rank)
        form += "" if maps == MIXING else f", {maps}"
        sizes = group[0]["results"]["bytes_per_token"]
        size = f"{sizes['source']:,} to {sizes['target']:,}"
        for name in group[0]["results"]["scores"]:
            hits, kls = (_values(group, name, key) for key in ("hits", "kl"))
            rows.append(
                [
                    form,
                    ARROWS[direction],
                    size,
                    name,
                    _spread(hits, "{:.3f}"),
                    _spread(kls, "{:.4f}"),
                ]
            )
    return table(["caches", "", "bytes a token", "condition", "recall", "KL"], rows)


def _values(group: list[dict], name: str, key: str) -> list[float]:
    scores = (record["results"]["scores"] for record in group)
    return [each[name][key] for each in scores if name in each]


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    text = form.format(np.mean(values))
    if len(values) > 1 and min(values) < max(values):
        text += f" ({form.format(min(values))} to {form.format(max(values))})"
    return text
