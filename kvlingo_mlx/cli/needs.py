"""The table of options that need others to have an effect; without them they are refused.

Each row names fields of a verb's dataclass. A new option needs a row here, or an entry in the
test's list of options that always have an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typer.core import TyperCommand

from kvlingo_mlx.cli.command import take_words
from kvlingo_mlx.cli.eval_options import OWN, words
from kvlingo_mlx.cli.keys import KEYS, hide, is_key, spelled, write_help
from kvlingo_mlx.format.kinds import KINDS
from kvlingo_mlx.options import Need, OptionError, among, as_argument, is_set, off


def asks(*names: str) -> Any:
    """A function that tells whether one of these is among the words of an option."""
    return lambda tasks: any(name in names for name in words(tasks))


def public(tasks: str) -> bool:
    """Whether lm-eval runs one of the tasks."""
    return any(name not in OWN for name in words(tasks))


def written(tasks: str) -> bool:
    """Whether a model writes the answers of one of the tasks."""
    return asks("needles")(tasks) or public(tasks)


def drawn(data: str | None, tasks: str) -> bool:
    """Whether some item is generated or chosen at random."""
    return data is None or words(tasks) != ["continuation"]


def _local(files: list[str] | None, tasks: str) -> bool:
    """Whether every NAME=FILE names one of the tasks."""
    return all(text.partition("=")[0] in words(tasks) for text in files or [])


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

VERBS: dict[str, tuple[Need, ...]] = {
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
    "export": PAIR,
    "verify": (
        *PAIR,
        Need("allow_mismatch", "source", is_set, "MODEL", "against which nothing is checked"),
    ),
    "eval": (
        Need("data window", "tasks", asks("continuation"), "continuation"),
        Need("window", "data", is_set, "FILE", "whose texts it cuts"),
        Need("needles lengths style haystack", "tasks", asks("needles"), "needles"),
        Need("max_tokens thinking", "tasks", written, "needles", "whose tasks write no answer"),
        Need("compare quantize", "device", among("mlx"), "mlx", "which runs PyTorch"),
        Need("batch_size num_shots chat include_path metadata unsafe_code", "tasks", public,
             "gsm8k", "which lm-eval does not run"),
        Need("task_data", "task_data tasks", _local,
             told="where it names no task of --tasks; name it there, or leave the file out"),
        Need("seed", "data tasks", drawn, why="since the file's records are read in order"),
        Need("plot", "compare", bool, True, "which measures the times that the plot shows"),
    ),
    "tune": (
        Need("seed", "data", off, why="since the file's records are read in order"),
        Need("plot", "lengths", off, why="which would need a picture for each"),
    ),
    "bench": (
        Need("source target translator", "geometry", off, why="whose models and maps are random"),
        Need("layers precision", "geometry", is_set, "qwen3-4b:qwen3-30b-a3b",
             "and models from a folder are as they are"),
    ),
}  # fmt: skip


TYPED = ("COMMANDLINE", "DEFAULT_MAP")  # or read from --config


class Checked(TyperCommand):
    """A verb that refuses options without effect before it begins."""

    needs: ClassVar[Mapping[str, tuple[Need, ...]]] = VERBS
    keys: ClassVar[Mapping[str, str]] = KEYS

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        hide(self.keys.get(name or "", ""), self.params)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the verb; of two models there are no more."""
        return [piece.replace("[A B]...", "[A B]") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options into the help, in groups."""
        write_help(self, ctx, formatter)

    def needed(self) -> tuple[Need, ...]:
        """The rows of this verb: those of its options' groups, and its own."""
        return (*getattr(self.callback, "needs", ()), *self.needs.get(self.name or "", ()))

    def invoke(self, ctx: Any) -> Any:
        """Check the options, then run the verb; wrong ones are named as they are typed."""
        options = {p.name: p for p in self.params}
        sources = {name: ctx.get_parameter_source(name) for name in options}
        typed = [n for n, found in sources.items() if found and found.name in TYPED]
        typed += take_words(self.name or "", ctx.params)

        def spell(name: str, value: Any) -> str:
            if name not in options:
                return as_argument(name, value)
            option = options[name]
            is_as_ever = is_key(option) and value is option.default is False
            return spelled(option, None if is_as_ever else value)

        try:
            for need in self.needed():
                need.check(typed, ctx.params)
            return super().invoke(ctx)
        except OptionError as error:
            raise ValueError(error.write(spell)) from error
