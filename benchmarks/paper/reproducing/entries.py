"""Every table and figure of the paper: what makes it, and of what.

A table's rows are named in ``tables.jsonl``; ``columns`` says what each column of values is a score
of, in the words of :func:`.cells.said_by`. A figure lists pairs, benchmarks and readers instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks.paper.reproducing.cells import Cell, Grid, Row, of_figure, of_table
from benchmarks.paper.reproducing.tables import LARGE_TO_SMALL, SMALL_TO_LARGE, WAYS, Pair, tables

Maker = Literal[
    "scores",  # benchmarks, by every reader
    "seeds",  # what seeds change of scores
    "signs",  # in how many cells one translator scores lower than another
    "turns",  # conversations in which two models alternate
    "curves",  # held-out KL of trainings
    "perplexity",  # continuations of plain text
    "statistics",  # of two models' caches
    "lengths",  # of the training data
    "times",  # of a switch and its parts
    "protocol",  # nothing is measured: what the figure draws is in the documentation
]

SMALL, LARGE = ("Qwen3-0.6B", "Qwen3-1.7B"), ("Qwen3-4B", "Qwen3-8B")
FAR, NEAR = ("Qwen3-0.6B", "Qwen3-8B"), ("Qwen3-1.7B", "Qwen3-4B")
GEMMA3, GEMMA4 = ("gemma-3-4b-it", "gemma-3-12b-it"), ("gemma-4-E2B-it", "gemma-4-E4B-it")
MIXTURE = ("Qwen3-4B", "Qwen3-30B-A3B")
MISTRAL = ("Mistral-7B-Instruct-v0.3", "Qwen3-8B")
BASES = (f"{SMALL[0]}-Base", f"{SMALL[1]}-Base")
# Of models that the authors made (made-models.md); they are found in --models by these names.
LATENTS_60K, BASELINE_60K, LATENTS, BASELINE = (
    (f"{LARGE[0]}-{how}", f"{LARGE[1]}-{how}")
    for how in ("latents-60k", "baseline-60k", "latents", "baseline")
)
SCRATCH = (f"{SMALL[0]}-scratch", f"{SMALL[1]}-scratch")
SLICED = (f"{SMALL[0]}-scratch-sliced", f"{SMALL[1]}-scratch")

NINE = "mmlu_pro arc_challenge ruler longmemeval coqa ifeval xquad repliqa mt_bench_101".split()
FOUR = "mmlu_pro arc_challenge ruler longmemeval".split()
SIX = [*"mmlu_pro arc_challenge longbench_v2 xquad mt_bench_101".split(), "ruler 4k-16k"]
REASONED = "mmlu_pro arc_challenge gsm8k repliqa mt_bench_101 longmemeval".split()
SEVEN = "mmlu_pro arc_challenge repliqa longmemeval gsm8k ifeval xquad".split()
LONG = "ruler longmemeval longbench_v2".split()
CONVERTED = "mmlu_pro arc_challenge xquad coqa repliqa".split()  # figure "mla_pair": no IFEval
ZERO_SHOT = "boolq hellaswag piqa arc_easy arc_challenge winogrande".split()
CORPORA = "nemotron wikitext code books arxiv".split()
SEEDS = (42, 43, 44)
LONG_TOO = [*(name for name in NINE if name != "repliqa"), "longbench_v2"]
SHORT = "mmlu_pro arc_challenge gsm8k ifeval coqa xquad".split()
RULERS = [f"ruler {rung}" for rung in ("4k", "8k", "16k", "32k")]
MEMORIES = [f"longmemeval {rung}" for rung in ("oracle", "8k", "16k", "32k")]
GEMMAS = [*SHORT, "repliqa", *RULERS[:3]]  # with MT-Bench-101, the rows of table "gemma3"
SPREAD = [*SHORT, "repliqa", "mt_bench_101", *RULERS, "longmemeval", "longbench_v2"]

SHAPE = "small large closed mixing mixed_loss head_wise head_wise_mlp".split()
DEPTHS = "small large closed closed+{0} mixing mixing+{0}".split()
BY_R2, BY_GREED = ([word.format(how) for word in DEPTHS] for how in ("r2", "greedy"))
NUS = ["mixing+r2", *(f"mixing+r2+nu{nu}" for nu in (2, 4, 8))]
DEPTH_NUS, GREEDY_NUS = ([f"mixing{how}{nu}" for nu in ("", "+nu2", "+nu4", "+nu8")]
                         for how in ("", "+greedy"))  # fmt: skip
HEAD_WISE_NUS = ["head_wise+greedy", *(f"head_wise+greedy+nu{nu}" for nu in (2, 4, 8))]
# At nu = 1 the greedy choice is the one by R2, up to the ridge.
CHOICES = ["small", "large", *DEPTH_NUS, *NUS, *GREEDY_NUS[1:]]
EVERY = ["small", "large", "closed+r2", "closed_head_wise+greedy", "mixing+r2", "mixing+r2+nu4",
         "head_wise+greedy", "head_wise+greedy+nu8", "head_wise_mlp", "mixing_mlp"]  # fmt: skip
RECOMPUTED = (0, 4, 8, 12, 16, 18, 20, 22, 24, 26)
CAPS = [f"mixing{capture}+cap{cap}k" for capture in ("", "+post_rope") for cap in (2, 8, 16)]
HERE = "docs/guides/fitting-and-training.md"
# Judged by covered facts between Qwen3 models of one shape, and over all questions between two
# tokenizers (appendix "Evaluation data").
How = Mapping[str, Mapping[str, Any]]
FACTS: How = {"repliqa": {"row": "repliqa_facts"}}
TO_16K: How = {"ruler": {"rungs": "4k-16k"}}
REASONS = {"thinking": True}
LONG_ANSWERS = {"budget": (2048, 2048)}
XTOK: How = {"repliqa": {"row": "repliqa_all"}, "longmemeval": {"rungs": "oracle-16k"},
        "mmlu_pro": LONG_ANSWERS, "arc_challenge": LONG_ANSWERS}  # fmt: skip
SUBSAMPLE: How = {"arc_challenge": {"items": 400}, "mmlu_pro": {"items": 420}}
# What a page says under its numbers of several labels.
NO_TIMES = "the paper's axis of times is not drawn here: these are the scores alone"
IF_MADE = "rows of the pair pretrained from scratch, on --text, are there if --models has it"
ONE_RATE = "rates are swept; the paper has a single one for the pair from scratch, unnamed"
MEAN_OF_THREE = "RULER at 4k, 8k and 16k counts three times, as it has three rows in tab:gemma3"
RANDOM = "models have random weights; vLLM is timed in its process, not at a client"


@dataclass(frozen=True)
class Entry:
    """One table or figure.

    Attributes:
        label: Its label in the paper.
        title: What it shows, in a few words.
        maker: What makes it.
        pairs: The small and the large model of each pair, where its rows do not name them.
        what: The benchmarks, where its rows do not name them.
        who: Who reads, where no table names them.
        columns: For a table, what each column of values is a score of; empty for none.
        default: What neither rows nor columns say of a cell.
        modes: Whether answers reason: ``off``, ``on`` or both.
        seeds: The seeds of trainings.
        by: Other seeds, by a reader's name or by a pair.
        suffix: The ending of the models' names that the table leaves out.
        suite: The suite that its benchmarks are of.
        ways: Which of the two directions a figure has.
        only: The ways or pairs of readers that a figure does not have everywhere.
        how: By benchmark, what is asked otherwise than in the suite: its ``row`` there (another
            rubric), ``rungs``, ``thinking``, ``budget``, ``shots``, ``draw``, or ``items``, the
            first that are used.
        means: The benchmarks of a figure's means, by name; all of them where nothing is said.
        differs: How its numbers are made otherwise than the paper's, a sentence each.
        extra: What its maker is told besides.
        why: Where a protocol is described.
    """

    label: str
    title: str
    maker: Maker
    pairs: tuple[Pair, ...] = ()
    what: tuple[str, ...] | list[str] = ()
    who: tuple[str, ...] | list[str] = ()
    columns: tuple[str, ...] | list[str] = ()
    default: Mapping[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = ("off",)
    seeds: tuple[int, ...] = (42,)
    by: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    suffix: str = ""
    suite: str = "paper"
    ways: tuple[str, ...] = WAYS
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    how: How = field(default_factory=dict)
    means: Mapping[str, tuple[str, ...] | list[str]] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""

    @property
    def kind(self) -> str:
        """``table`` or ``figure``."""
        return "figure" if "fig:" in self.label else "table"

    def grid(self) -> Grid:
        """The cells of an entry of scores, as they are laid out."""
        if self.columns:
            default = dict(self.default)
            if self.pairs:
                default.setdefault("pair", self.pairs[0])
            table = tables()[self.label]
            found = of_table(table, tuple(self.columns), default, self.seeds, self.suffix)
        else:
            found = of_figure(
                self.pairs, self.ways, tuple(self.what), tuple(self.who), self.modes, self.seeds
            )
        rows = (Row(row.names, tuple(map(self.asked, row.cells)), row.paper) for row in found.rows)
        return replace(found, rows=tuple(rows))

    def asked(self, cell: Cell | None) -> Cell | None:
        """A cell with what this entry says of its benchmark and its reader; None if it has none."""
        if cell is None or not {cell.way, cell.pair} & {*self.only.get(cell.who, (cell.way,))}:
            return None
        how = self.how.get(cell.benchmark, {})
        seeds = self.by.get(cell.pair, cell.seeds) if cell.seeds == self.seeds else cell.seeds
        return replace(
            cell,
            what=cell.what if cell.rung else f"{cell.what} {how.get('rungs', '')}".strip(),
            thinking=how.get("thinking", cell.thinking),
            seeds=self.by.get(cell.who, seeds),
        )


def _on(columns: list[str]) -> list[str]:
    """The same columns with reasoning."""
    return [f"on {column}" for column in columns]


L2S, S2L = {"way": LARGE_TO_SMALL}, {"way": SMALL_TO_LARGE}

ENTRIES = (
    # The main text.
    Entry("fig:main", "what a translator does", "protocol", why="README.md"),
    Entry("fig:cka", "which layers of two models correspond", "statistics", (SMALL, GEMMA3),
          differs=(IF_MADE,), extra={"statistic": "cka", "made": (SCRATCH,)}),
    Entry("fig:qwen3small", "means of nine benchmarks, two pairs", "scores", (SMALL, FAR), NINE,
          [*SHAPE, "mixing+r2+nu2", "mixing_mlp"], seeds=SEEDS, by={FAR: (42,)}, how=FACTS,
          only={"mixing+r2+nu2": (FAR,), "mixing_mlp": (FAR,)},
          differs=("the paper does not say how it judges RepLiQA between 0.6B and 8B",)),
    Entry("fig:ttft", "scores over times to the first token", "scores", (LARGE, FAR), LONG,
          ["small", "large", "mixing", "mixing+r2+nu2", "head_wise_mlp"], seeds=SEEDS,
          by={FAR: (42,)}, ways=(SMALL_TO_LARGE,), differs=(NO_TIMES,),
          only={"mixing": (LARGE,), "mixing+r2+nu2": (FAR,)}),
    Entry("fig:multiturn_coqa", "ten turns of CoQA, turn by turn", "turns", (LARGE,), ("coqa",),
          ("mixing",), seeds=SEEDS),
    Entry("fig:cost", "what a switch costs", "times", (SMALL, LARGE, MIXTURE), differs=(RANDOM,)),
    # Motivating measurements.
    Entry("app:fig:cka", "how sharply layers correspond", "statistics",
          (SMALL, LARGE, BASES, (f"{LARGE[0]}-Base", f"{LARGE[1]}-Base"), GEMMA3, FAR),
          differs=(IF_MADE, "the paper does not name the two pairs of its random controls"),
          extra={"statistic": "contrast", "random": (SMALL, GEMMA3), "made": (SCRATCH,)}),
    Entry("tab:linearity", "R2 of linear maps and of an MLP", "statistics", (LARGE, SMALL),
          differs=(IF_MADE, "the MLP starts as the linear map; the paper's may keep it instead"),
          extra={"statistic": "linearity", "made": (SCRATCH,)}),
    Entry("tab:affine", "R2 with and without an intercept", "statistics", (LARGE, SMALL),
          differs=(IF_MADE,), extra={"statistic": "affine", "made": (SCRATCH,)}),
    Entry("tab:erank", "effective ranks, trained and random", "statistics", (SMALL, LARGE),
          differs=(IF_MADE, "ranks are of keys; the paper does not say of what"),
          extra={"statistic": "rank", "made": (SCRATCH,)}),
    Entry("fig:head_alignment", "which heads correspond", "statistics", (SMALL, LARGE),
          differs=(IF_MADE, "the mean diagonal of each grid, not the grid"),
          extra={"statistic": "heads", "made": (SCRATCH, SLICED)}),
    # Data and protocol.
    Entry("fig:kvlingo_computation", "architecture and training", "protocol",
          why="ARCHITECTURE.md"),
    Entry("tab:evalsets", "the evaluation suite", "protocol",
          why="benchmarks/paper/measuring.md"),
    Entry("tab:lrs", "selected learning rates", "curves",
          (SMALL, LARGE, FAR, NEAR, GEMMA3, GEMMA4),
          differs=("head-mixing rates of several layers are swept at seed 42, the paper's at 56",)),
    Entry("fig:prefixhist", "prefix lengths of the training mixture", "lengths", (SMALL,)),
    Entry("tab:seedsd", "spread over seeds beside errors over items", "seeds",
          (SMALL, LARGE, FAR, NEAR, GEMMA3, GEMMA4), SPREAD, modes=("off", "on"), seeds=SEEDS,
          differs=("the paper does not say which translators of a family count: here two each",),
          extra={"families": {
              "shape-preserving Qwen3": ((SMALL, LARGE), ("mixing", "head_wise"), SPREAD),
              "cross-layer Qwen3": ((FAR, NEAR), ("mixing", "mixing+greedy"), SPREAD),
              "Gemma-3": ((GEMMA3,), ("mixing", "mixing+greedy"), [*GEMMAS, "mt_bench_101"]),
              "Gemma-4": ((GEMMA4,), ("mixing", "mixing+greedy"), [*SIX[:-1], *RULERS[:3]])}}),
    Entry("tab:seedsets", "seed 42 beside the mean of three", "seeds",
          (FAR, NEAR, GEMMA4, GEMMA3), [*FOUR, *SIX, *GEMMAS], seeds=SEEDS,
          differs=(MEAN_OF_THREE,),
          extra={"sets": {FAR: FOUR, NEAR: FOUR, GEMMA4: SIX,
                          GEMMA3: [*GEMMAS, "mt_bench_101"]}}),
    # Qwen3 pairs of one shape.
    Entry("fig:suite_off", "the suite without reasoning", "scores", (SMALL, LARGE), NINE, SHAPE,
          seeds=SEEDS, how=FACTS),
    Entry("fig:suite_on", "the suite with reasoning", "scores", (SMALL, LARGE), REASONED, SHAPE,
          modes=("on",), seeds=SEEDS, how=FACTS),
    Entry("tab:qwen3ls", "the suite, large to small", "scores", columns=SHAPE, default=L2S,
          seeds=SEEDS, how=FACTS),
    Entry("tab:qwen3sl", "the suite, small to large", "scores", columns=SHAPE, default=S2L,
          seeds=SEEDS, how=FACTS),
    Entry("fig:head_mixing_mlp_shape", "head-mixing and head-wise MLPs", "scores", (LARGE,),
          LONG_TOO, [*SHAPE, "wide_mlp"], seeds=SEEDS, only={"wide_mlp": (SMALL_TO_LARGE,)}),
    Entry("fig:suite_small_on_mean", "means with reasoning, 0.6B and 1.7B", "scores", (SMALL,),
          REASONED, SHAPE, modes=("on",), seeds=SEEDS, how=FACTS),
    # Unequal depths.
    Entry("fig:xdepth_all_1", "every translator, 0.6B and 8B", "scores", (FAR,), NINE, EVERY,
          by={"mixing+r2": SEEDS}),
    Entry("fig:xdepth_all_2", "every translator, 1.7B and 4B", "scores", (NEAR,), NINE, EVERY,
          by={"mixing+r2": SEEDS}),
    Entry("fig:xdepth_assignment", "the assignment by relative depth", "protocol", why=HERE),
    Entry("tab:xdepth", "two assignments, unequal depths", "scores", columns=BY_R2, how=TO_16K),
    Entry("app:tab:xdepthruler", "RULER by length, unequal depths", "scores",
          columns=["small", "large", "mixing", "mixing+r2",
                   *_on(["small", "large", "mixing", "mixing+r2"])], default={"what": "ruler"}),
    Entry("app:tab:xdepthlme", "LongMemEval with reasoning, unequal depths", "scores",
          columns=_on(BY_R2), default={"what": "longmemeval"}),
    Entry("fig:assignment_comparison_1", "three assignments, 0.6B and 8B", "scores", (FAR,), FOUR,
          CHOICES),
    Entry("fig:assignment_comparison_2", "three assignments, 1.7B and 4B", "scores", (NEAR,),
          FOUR, CHOICES),
    Entry("fig:head_wise_vs_head_mixing", "head-mixing and head-wise by source layers", "scores",
          (FAR,), NINE, ["small", "large", *NUS, *HEAD_WISE_NUS]),
    Entry("fig:xdepth_think", "with reasoning, 0.6B and 8B", "scores", (FAR,), REASONED,
          [*BY_R2, "mixing+r2+nu4"], modes=("on",)),
    Entry("fig:nsrc_ttft", "scores over times, by source layers", "scores", (NEAR,),
          [*RULERS, *MEMORIES], ["small", "large", *NUS[1:]], differs=(NO_TIMES,)),
    Entry("fig:n_src_cross_depth", "RULER by source layers", "scores", (FAR, NEAR), RULERS,
          ["small", "large", *NUS]),
    Entry("app:tab:nsrc", "four benchmarks by source layers", "scores",
          columns=["small", "large", *NUS]),
    # Gemma, two tokenizers, latents.
    Entry("fig:gemma-3", "means, Gemma 3", "scores", (GEMMA3,), [*GEMMAS, "longbench_v2"],
          [*BY_GREED, *DEPTH_NUS[1:3], *GREEDY_NUS[1:3]],
          differs=(MEAN_OF_THREE, "LongBench-v2 is what fits; the paper cuts it at 16,384 tokens")),
    Entry("tab:gemma3", "the suite, Gemma 3", "scores", columns=BY_GREED),
    Entry("tab:gemma3nu", "more source layers, Gemma 3", "scores",
          columns=["small", "large", *DEPTH_NUS[1:3], *GREEDY_NUS[:3]],
          differs=("greedy at nu = 1 is that of tab:gemma3, the paper's another one",)),
    Entry("fig:gemma-4", "means, Gemma 4", "scores", (GEMMA4,), SIX, BY_GREED),
    Entry("tab:gemma4", "the suite, Gemma 4", "scores", columns=BY_GREED,
          how={**TO_16K, "mt_bench_101": REASONS, "longbench_v2": REASONS},
          differs=("LongBench-v2 is what fits into both contexts; the paper has 395 items",)),
    Entry("fig:xtok_assignment", "tokens of two tokenizers", "protocol",
          why="docs/guides/two-tokenizers.md"),
    Entry("tab:xtok", "two tokenizers", "scores", (MISTRAL,),
          columns=["small", "large", "mixing+nu3"], how=XTOK),
    Entry("fig:xtok_pair", "two tokenizers, means", "scores", (MISTRAL,), SEVEN,
          ("small", "large", "mixing+nu3"), how=XTOK),
    Entry("fig:mla_pair", "latents, means", "scores", (LATENTS,), CONVERTED,
          ("small", "large", "closed", "mixing")),
    Entry("tab:mla", "latents", "scores", (LATENTS,),
          columns=["small", "large", "closed", "mixing"]),
    Entry("app:tab:mla", "latents beside keys and values", "scores",
          (LATENTS_60K, BASELINE_60K, LATENTS, BASELINE), ("mmlu_pro", "arc_challenge"),
          ("mixing",), extra={"beside": "native"},
          differs=("the paper does not say whether its 60k is a run of its own: here it is",)),
    # DroidSpeak, a mixture of experts.
    Entry("tab:droidspeak", "DroidSpeak", "scores", (SMALL,),
          columns=[f"{way} {what}" for way in ("small-to-large", "large-to-small")
                   for what in ("arc_challenge", "mmlu_pro", "compute")],
          default={"rows": ("target", "source", "reuse", "droidspeak", None, "closed", "mixing")},
          differs=("the profiler reads eight conversations of the training data; the paper does "
                   "not say which it read",)),
    Entry("tab:droidspeak_sweep", "DroidSpeak by recomputed layers", "scores", (SMALL,),
          columns=[f"{way} {what}" for way in ("small-to-large", "large-to-small")
                   for what in ("arc_challenge", "mmlu_pro")],
          default={"rows": (*(f"droidspeak:{j}" for j in RECOMPUTED), "target")}, how=SUBSAMPLE),
    Entry("app:tab:moe", "a mixture of experts, the suite", "scores", (MIXTURE,),
          columns=[f"{mode} {reader}" for mode in ("off", "on")
                   for reader in ("small", "large", "small-to-large mixing+nu3",
                                  "large-to-small mixing+nu3")], default=S2L, how=FACTS),
    Entry("app:fig:moe", "a mixture of experts, means", "scores", (MIXTURE,),
          [*SHORT, "repliqa", "mt_bench_101", *LONG], ("small", "large", "mixing+nu3"),
          modes=("off", "on"), ways=(SMALL_TO_LARGE,), how=FACTS,
          means={"short, judged": ("repliqa", "mt_bench_101"), "short, other": SHORT,
                 "long": LONG}),
    Entry("app:tab:moemlp", "a mixture of experts, linear and not", "curves", (MIXTURE,),
          extra={"steps": (0, 1000, 2500, 5000)}),
    Entry("app:tab:moespeed", "a mixture of experts, times", "times", (MIXTURE,),
          differs=("a switch is measured whole; the paper adds 1 / decoding speed to the "
                   "translation", "models have random weights")),
    # Norms, reasoning, turns.
    Entry("app:tab:cachedist", "R2 and scores before and after the key norm", "scores",
          columns=["", "mmlu_pro closed", "arc_challenge closed", "", "mmlu_pro closed+post_norm",
                   "arc_challenge closed+post_norm"], extra={"beside": "R2"},
          differs=("R2 is over 16 held-out prefixes of up to 1,024 tokens; the paper does not say "
                   "of how many",)),
    Entry("app:tab:norms", "norms of the closed form", "curves", (SMALL,), suffix="-Base",
          extra={"steps": 15_000,
                 "norms": ("frobenius", *(f"sink_{n}" for n in (2, 4, 8, 16, 32)),
                           "attention_mass", "attention_fisher")}),
    Entry("app:fig:norms", "stage 2 from two norms", "curves", (SMALL,), suffix="-Base",
          extra={"steps": 15_000, "norms": ("frobenius", "attention_mass")}),
    Entry("app:fig:reasoningboost", "what reasoning brings", "scores", (SMALL, LARGE),
          ("mmlu_pro", "arc_challenge", "mt_bench_101", "ruler 4k-16k"),
          ("small", "large", "mixing"), modes=("off", "on"), seeds=SEEDS),
    Entry("fig:multiturn", "the protocol of several turns", "protocol",
          why="docs/guides/conversations.md"),
    Entry("app:fig:multiturn_quac", "eight turns of QuAC, turn by turn", "turns", (LARGE,),
          ("quac",), ("mixing",), seeds=SEEDS),
    Entry("app:fig:multiturn_multichallenge", "MultiChallenge by turns", "turns", (LARGE,),
          ("multichallenge",), ("mixing",), seeds=SEEDS),
    # Capture points, hand-off points.
    Entry("app:tab:knorm", "after the key norm minus before", "signs", (SMALL, LARGE),
          [*LONG, "repliqa", "mmlu_pro", "arc_challenge"], ("mixing", "mixing+post_norm"),
          modes=("off", "on"), seeds=SEEDS,
          differs=("no cells of RepLiQA's token-F1", "errors are those of unpaired differences, "
                   "and so larger", "the paper does not say whether MMLU-Pro and ARC-C reason",
                   "no row of LongMemEval over several turns"),
          extra={"rows": ((RULERS, "off"), (RULERS, "on"), (MEMORIES, "on"), None,
                          (["longbench_v2"], "off"), (["repliqa"], "on"),
                          (["mmlu_pro", "arc_challenge"], "off"))}),
    Entry("tab:pre_vs_post_rope", "before the key norm and after rotation", "scores",
          columns=["small", "large", "mixing", "mixing+post_rope"], how={"gsm8k": REASONS}),
    Entry("fig:pre_vs_post_rope_extrapolation", "beyond the trained length", "scores", (SMALL,),
          RULERS, CAPS, seeds=SEEDS),
    Entry("tab:ctxonly", "the context alone", "scores",
          columns=["small", "large", *(f"{who}{point}" for who in ("closed", "mixing", "mixed_loss")
                                       for point in ("", "@context"))], seeds=SEEDS,
          how={"longmemeval": {"draw": 256}}),
    Entry("tab:cothandoff", "a switch after the reasoning", "scores", (SMALL,),
          columns=_on(["small", "large", "text@trace", "closed", "closed@trace", "mixing",
                       "mixing@trace"]), default=L2S, seeds=SEEDS),
    # From scratch, base models, languages.
    Entry("app:fig:scratch", "a pair from scratch beside the released one", "perplexity",
          (BASES, SCRATCH), [*CORPORA[:2], *ZERO_SHOT], ("target", "closed", "mixing"),
          suite="scratch", means={"mean": ZERO_SHOT}, only={"closed": (SCRATCH,)},
          differs=(ONE_RATE,), extra={"window": (256, 64)}),
    Entry("tab:scratch", "a pair from scratch, six tasks", "scores", (SCRATCH,),
          columns=["small", "large", "mixing", "head_wise_mlp+hidden512", "head_wise_mlp"],
          suite="scratch", differs=(ONE_RATE,)),
    Entry("tab:scratchppl", "a pair from scratch, perplexity", "perplexity", (SCRATCH,),
          CORPORA[:2], ("closed", "cross_entropy", "mixing", "head_wise_mlp+hidden512",
                        "head_wise_mlp"), suite="scratch", differs=(ONE_RATE,),
          extra={"window": (256, 64)}),
    Entry("tab:base", "base models, four tasks", "scores",
          columns=["small", "large", "closed", "mixing"], seeds=SEEDS, suffix="-Base",
          suite="base"),
    Entry("tab:baseppl", "base models, perplexity of five corpora", "perplexity", suffix="-Base",
          who=("mixing",), seeds=SEEDS, what=CORPORA),
    Entry("tab:splitjoint", "separate and joint maps", "perplexity", who=("mixing", "joint"),
          what=("nemotron", "wikitext", "boolq"), suffix="-Base", suite="base",
          how={"boolq": {"shots": 0}},
          differs=("KL is of the held-out samples of training; the paper's of 2,048 tokens",)),
    Entry("fig:xquad", "eleven languages", "scores", (LARGE,), ("xquad",),
          ("small", "large", "closed", "mixing"), seeds=SEEDS, extra={"by": "language"}),
    # Times.
    Entry("tab:cost", "parts of a switch on a GPU", "times", (SMALL, LARGE),
          differs=("models have random weights",)),
    Entry("app:tab:vllm", "re-prefilling with vLLM", "times", (SMALL, LARGE, GEMMA3),
          differs=(RANDOM,)),
    Entry("app:tab:budget", "decoding under a memory budget", "times", (GEMMA3,)),
)  # fmt: skip
BY_LABEL = {entry.label: entry for entry in ENTRIES}
