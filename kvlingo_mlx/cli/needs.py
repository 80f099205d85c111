"""The table of options that need others to have an effect; without them they are refused.

Each row names fields of a verb's dataclass. A new option needs a row here, or an entry in the
test's list of options that always have an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand

from kvlingo_mlx.arguments import Need, among, but, check_needs, is_set, off, several
from kvlingo_mlx.cli.bench_options import BUDGET, HEALING
from kvlingo_mlx.cli.command import take_words
from kvlingo_mlx.cli.eval_options import OWN, words
from kvlingo_mlx.cli.keys import hide, spelled, tell_of_flags, write_help
from kvlingo_mlx.cli.output import given_options
from kvlingo_mlx.errors import tell_new_name
from kvlingo_mlx.evaluation.harness.tasks import JUDGED
from kvlingo_mlx.evaluation.suites import Benchmark, chosen
from kvlingo_mlx.format.kinds import KINDS

OLD_OPTIONS = {"--save-profile": "--save-timings"}  # old names with new ones, for one release


def _asks(*names: str) -> Any:
    """A function that tells whether one of these tasks is asked for, by ``--tasks`` or a suite."""
    return lambda tasks, suite=None: any(name in names for name in _asked(tasks, suite))


def _asked(tasks: str, suite: str | None) -> list[str]:
    """The names of the tasks that are asked for; a suite takes the place of ``--tasks``."""
    return words(tasks) if suite is None else [row.task for row in _rows(suite)]


def _rows(suite: str) -> list[Benchmark]:
    """A suite's benchmarks; none if it is misspelt, which the verb tells."""
    try:
        return list(chosen(suite))
    except ValueError:
        return []


def _public(tasks: str) -> bool:
    """Whether lm-eval runs one of the tasks."""
    return any(name not in OWN for name in words(tasks))


def _lm_eval(tasks: str, suite: str | None) -> bool:
    """Whether lm-eval runs one of the tasks, or one of a suite's."""
    return _public(tasks) if suite is None else any(row.task not in OWN for row in _rows(suite))


def _written(tasks: str, suite: str | None) -> bool:
    """Whether a model writes the answers of one of the tasks."""
    if suite is not None:
        return any(row.budget for row in _rows(suite))
    return _asks("needles")(tasks) or _public(tasks)


def _reasons(tasks: str, suite: str | None) -> bool:
    """Whether a chat template renders one of the prompts whose answers are written."""
    if suite is not None:
        return any(row.chat is not False for row in _rows(suite))
    return _written(tasks, suite)


def _drawn(data: str | None, tasks: str) -> bool:
    """Whether some item is generated or chosen at random."""
    return data is None or words(tasks) != ["continuation"]


def _held(turns: str | None) -> list[str]:
    """The benchmarks whose conversations are held, without their numbers of turns."""
    return [word.partition(":")[0] for word in words(turns or "")]


def _local(files: list[str] | None, tasks: str, suite: str | None, turns: str | None) -> bool:
    """Whether every NAME=FILE names one of the tasks."""
    asked = _asked(tasks, suite) if turns is None else _held(turns)
    return all(text.partition("=")[0] in asked for text in files or [])


def _or_turns(test: Callable[[str, str | None], bool]) -> Callable[..., bool]:
    """Whether conversations are held, or a test of the tasks holds."""
    return lambda tasks, suite, turns: is_set(turns) or test(tasks, suite)


def _judged(tasks: str, suite: str | None, turns: str | None) -> bool:
    """Whether a judge is asked about some answer."""
    asked = _asked(tasks, suite) if turns is None else _held(turns)
    return any(name in JUDGED for name in asked)


GREEDY = "which takes the likeliest token"
SAMPLING = Need("top_p top_k min_p seed", "temp", lambda temp: temp != 0, 0.7, GREEDY)
OWN_CACHE = "which decodes from the source's own cache"
HIDDEN = tuple(spec.kind for spec in KINDS if spec.has_hidden)
UNSOLVED = tuple(spec.kind for spec in KINDS if not spec.solved)  # not solved in closed form
PAIR = (
    Need("source", "target", is_set, "MODEL"),
    Need("target", "source", is_set, "MODEL"),
)
HISTOGRAM = (
    "out kind head_mixing joint capture nu assignment state_maps norm ridge hidden native_layers "
    "objective ce_weight lr held_out val_every dtype device plot force gated stage1_steps "
    "stage1_lr sweep at_once seeds"
)
MEMORY_BUDGET = (
    "source target translator geometry nu quantize native_layers prompt batch "
    "prefill_step_size plot save_timings"
)

VERBS: dict[str, tuple[Need, ...]] = {
    "generate": (
        Need("draft_model num_draft_tokens strategy native_head native_tail quantized_kv_start "
             "heal guard", "memory_budget", off, why=OWN_CACHE),
        Need("native_layers", "memory_budget native_layers",
             lambda budget, layers: off(budget) or layers == "0", why=OWN_CACHE),
        Need("system_prompt ignore_chat_template", "messages_file", off, why="which is a chat"),
        Need("kv_group_size quantized_kv_start", "kv_bits", is_set, 8),
        Need("heal_share", "heal", is_set, "interleaved"),
        Need("on_doubt", "guard", bool, 32),
        Need("num_draft_tokens", "draft_model", is_set, "MODEL"),
        Need("translator quantize allow_mismatch native_layers native_head native_tail heal guard",
             "strategy", but("native"), "accelerator", "by which --target reads all of the prompt"),
        Need("system_prompt thinking", "ignore_chat_template", off,
             why="which takes the prompt as it is"),
        SAMPLING,
    ),
    "chat": (
        *PAIR,
        Need("source target", "model", lambda model: not model, why="which names the models"),
        Need("translator quantize use route on_missing eager offload native_layers heal "
             "guard allow_mismatch", "model", several,
             told="with one model; give --model NAME=MODEL twice or more"),
        Need("heal_share", "heal", among("interleaved", "layers"), "interleaved"),
        Need("on_doubt", "guard", bool, 32),
        Need("system_prompt thinking verbatim", "resume", off,
             why="since a saved conversation keeps the settings it began with"),
        SAMPLING,
    ),
    "fit": (
        Need("nu", "assignment", lambda rule: not rule.endswith(".json"), "relative_depth",
             "which lists the layers itself"),
    ),
    "train": (
        Need(HISTOGRAM, "histogram", off, why="which only shows the data's prefix lengths"),
        Need("hidden", "kind", among(*HIDDEN), "mlp", "which has no hidden units"),
        Need("ridge", "kind", lambda kind: kind not in UNSOLVED, "linear",
             "which has no closed form"),
        Need("norm fit_samples", "kind assignment",
             lambda kind, rule: kind not in UNSOLVED or rule != "relative_depth", "linear",
             "which has no closed form"),
        Need("ce_weight", "objective", among("mixed"), "mixed"),
        Need("stage1_steps stage1_lr gated", "kind", among(*UNSOLVED), "mlp",
             "whose stage 1 is a closed form"),
        Need("objective ce_weight lr plot minutes", "steps", lambda steps: steps != 0,
             5000, "which leaves stage 2 out"),
        Need("held_out batch_size val_every sweep", "steps kind",
             lambda steps, kind: steps != 0 or kind in UNSOLVED, 5000, "which leaves stage 2 out"),
        Need("packed_share", "plain_text", off, why="which packs nothing"),
        Need("later_turns", "plain_text", off, why="which has no turns"),
        Need("at_once", "sweep", is_set, True),
        Need("sweep", "minutes", off, why="in which its rates would not all end"),
        Need("seed", "seeds", off, why="which names them all"),
    ),
    "import": PAIR,
    "export": (
        *PAIR,
        Need("source", "to", lambda to: to == "veloxquant", "veloxquant", "which asks no model"),
    ),
    "verify": (
        *PAIR,
        Need("allow_mismatch", "source", is_set, "MODEL", "against which nothing is checked"),
    ),
    "eval": (
        Need("tasks suite compare seed data window needles lengths style haystack num_shots chat "
             "include_path metadata unsafe_code switch_at batch_size device", "turns", off,
             why="which asks conversations alone, on MLX"),
        Need("tasks data window needles style num_shots chat include_path metadata unsafe_code",
             "suite", off, why="which has its own"),
        Need("data", "tasks", _asks("continuation"), "continuation"),
        Need("window", "tasks", _asks("continuation"), "continuation"),
        Need("window", "data", is_set, "FILE", "whose texts it cuts"),
        Need("profile_data", "baselines", _asks("droidspeak"), "droidspeak",
             "where no layers are chosen"),
        Need("needles style", "tasks", _asks("needles"), "needles"),
        Need("lengths", "tasks suite", _asks("needles", "longmemeval_rungs"), "needles"),
        Need("haystack", "tasks suite", _asks("needles"), "needles"),
        Need("max_tokens", "tasks suite turns", _or_turns(_written), "needles",
             "whose tasks write no answer"),
        Need("thinking", "tasks suite turns", _or_turns(_reasons), "needles",
             "whose tasks write no answer"),
        Need("compare quantize", "device", among("mlx"), "mlx", "which runs PyTorch"),
        Need("switch_at", "tasks suite", _written, "needles",
             "whose prompts are handed over whole"),
        Need("batch_size", "tasks suite", _lm_eval, "gsm8k", "which lm-eval does not run"),
        Need("num_shots chat include_path metadata unsafe_code", "tasks", _public, "gsm8k",
             "which lm-eval does not run"),
        Need("task_data", "task_data tasks suite turns", _local,
             told="where it names no task of --tasks; name it there, or leave the file out"),
        Need("judge", "tasks suite turns", _judged, JUDGED[0], "whose answers need no judge"),
        Need("judge_prompts", "judge", is_set, "MODEL"),
        Need("seed", "data tasks", _drawn, why="since the file's records are read in order"),
        Need("plot", "compare turns", lambda compare, turns: compare or is_set(turns), True,
             "which measures the times that the plot shows"),
    ),
    "tune": (
        Need("seed", "data", off, why="since the file's records are read in order"),
        Need("plot", "lengths", off, why="which would need a picture for each"),
    ),
    "analyze": (
        Need("hidden epochs", "mlp", is_set, True),
    ),
    "reproduce": (
        Need("labels tiny models translators data text task_data judge steps items seeds device",
             "listing", off, why="which makes nothing"),
    ),
    "bench": (
        Need(MEMORY_BUDGET, "table_name", but(BUDGET), "moe-switch",
             "whose models, maps and cache are the paper's, random"),
        Need("quantize batch", "table_name", but(HEALING), "moe-switch",
             "which heals one prompt behind the maps as they are"),
        Need("batch_sizes", "table_name", among(BUDGET), BUDGET,
             told=f"but with --table {BUDGET}; give --batch, or leave it out"),
        Need("source target translator", "geometry", off, why="whose models and maps are random"),
        Need("prompt", "geometry", off, why="whose models read random tokens"),
        Need("save_timings", "geometry", off, why="whose models are random"),
        Need("layers precision", "geometry table_name",
             lambda geometry, table: is_set(geometry) or table == BUDGET,
             "qwen3-4b:qwen3-30b-a3b", "and models from a folder are as they are"),
        Need("native_layers", "table_name", but("quant"), "moe-switch", "which times no switch"),
        Need("native_layers save_timings decode_tokens", "batch", among(1), 1,
             "of several prompts at once"),
        Need("decode_tokens", "table_name", among("moe-switch", "all", HEALING, BUDGET),
             "moe-switch",
             "which times no decoding"),
        Need("save_timings", "table_name", among("moe-switch", "all"), "moe-switch",
             "which does not time every way to a first token"),
    ),
}  # fmt: skip


class Checked(TyperCommand):
    """A verb that refuses options without effect before it begins."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        hide(name or "", self.params)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the verb; of two models there are no more."""
        return [piece.replace("[A B]...", "[A B]") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options into the help, in groups."""
        write_help(self, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, with old options replaced by their new names."""
        for old in OLD_OPTIONS.keys() & set(args):
            tell_new_name(old, OLD_OPTIONS[old])
        return super().parse_args(ctx, [OLD_OPTIONS.get(word, word) for word in args])

    def invoke(self, ctx: Any) -> Any:
        """Check the options, then run the verb."""
        options = {p.name: p for p in self.params}
        given = given_options(ctx)
        typed = [name for name, source in given.items() if source == "COMMANDLINE"]
        tell_of_flags(options, {name: ctx.params[name] for name in typed})
        given |= dict.fromkeys(take_words(self.name or "", ctx.params), "")

        def spell(name: str, value: Any) -> str:
            return spelled(options[name], value)

        check_needs(VERBS.get(self.name or "", ()), given, ctx.params, spell)
        return super().invoke(ctx)
