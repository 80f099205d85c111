"""python -m benchmarks.paper LABEL: the paper's tables and figures, by their labels."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvlingo_mlx.cli.command import VerbOptions, verb
from kvlingo_mlx.cli.eval_options import named_files
from kvlingo_mlx.cli.output import keep, phase, say, table, warn
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.options import COUNT, Need, is_set, off, option

if TYPE_CHECKING:
    from benchmarks.paper.reproducing.listing import Listed
    from benchmarks.paper.reproducing.results import Result
    from benchmarks.paper.reproducing.work import Size, Work


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(VerbOptions):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("tiny models translators data text task_data judge judge_prompts steps items seeds "
             "device processes", "listing", off, why="which makes nothing"),
        Need("judge_prompts", "judge", is_set, "MODEL"),
    )  # fmt: skip
    labels: list[str] | None = option(
        None, "Labels of the paper, such as tab:qwen3sl; or all.", word=True
    )
    listing: bool = option(
        False, "Name all tables and figures and what they take; or those named, in full.", "--list"
    )
    tiny: bool = option(False, "The same on tiny models and data, to try the way.")
    room: str = option("kvlingo-reproduce", "The folder of everything that is made and kept.")
    models: str | None = option(
        None, "A folder with models by name; what it lacks comes from the Hub."
    )
    translators: str | None = option(
        None, "A folder with translators to use where it has them, named as those of --room."
    )
    data: list[str] | None = option(
        None, "Conversations to train on: JSONL, folder or dataset; default: the paper's."
    )
    text: list[str] | None = option(
        None, "Plain text to train base models' translators on, the same way."
    )
    task_data: list[str] | None = option(
        None, "NAME=FILE: local records of a benchmark's task, as for eval."
    )
    judge: str | None = option(None, "A model that judges free answers: a folder or Hub id.")
    judge_prompts: str | None = option(
        None, "The benchmarks' own judge prompts: a folder of texts, or a JSON file."
    )
    steps: int | None = option(
        None, "Fewer steps of each training than the paper's 5,000.", kind=COUNT
    )
    items: int | None = option(None, "At most so many items of a benchmark.", kind=COUNT)
    seeds: int | None = option(
        None, "At most so many seeds, where the paper has three.", kind=COUNT
    )
    device: str | None = option(None, "What trains: mlx, cuda, cuda:N or cpu; as for train.")
    processes: int | None = option(
        None, "How many of PyTorch's processes train together; default: one on each GPU.",
        kind=COUNT,
    )  # fmt: skip


@verb(ReproduceOptions, long=True)
def command(options: ReproduceOptions) -> None:
    """Make a table or a figure of the paper again, and lay it beside the paper's numbers.

    It trains the translators that are needed, evaluates, and writes a page into --room. What is
    there already is not made again, so the same command goes on where it stopped. Of several
    labels, what cannot be made does not keep others from being made.
    """
    from benchmarks.paper.reproducing import listing

    if options.listing:
        _list(options, listing.listed(Path(options.room)))
        return
    if not options.labels:
        raise ValueError("no label is given; name one, or see them all by --list")
    entries = listing.named(options.labels)
    words = "models translators data text task_data judge judge_prompts steps items seeds device"
    optional = options.some(f"{words} processes")
    given = [name for name, value in optional.items() if value]
    at_most = ("steps", "items", "seeds")  # bounds that hold where there is nothing to count
    if idle := [name for name in listing.unused(entries, given) if name not in at_most]:
        raise ValueError(
            f"--{idle[0].replace('_', '-')} changes nothing in {', '.join(options.labels)}; "
            "leave it out"
        )
    results, failed = {}, []
    with phase("reproducing") as step:
        work = _work(options, lambda text: step(text=text))
        from benchmarks.paper.reproducing.running import reproduce

        for entry in entries:
            begun = time.monotonic()
            try:
                found, page = reproduce(entry, work)
            except Exception as error:  # a fault of ours, too: the others take hours
                if len(entries) == 1:
                    raise
                ours = not isinstance(error, (KVLingoError, ValueError, OSError))
                shown = f"{type(error).__name__}; `{entry.label} --debug` shows where"
                warn(f"{entry.label} is not made: {shown if ours else error}")
                failed.append(entry.label)
                continue
            _show(entry.label, entry.title, found)
            say(f"it is kept in {page}, after {time.monotonic() - begun:.0f} s")
            results[entry.label] = found
    told = {label: [vars(line) for line in found.lines] for label, found in results.items()}
    config = options.some("labels tiny steps items seeds judge")
    keep(options.json_file, "reproduce", config, told)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(entries)} labels are not made, as warned above: "
            f"{', '.join(failed)}; mend that, and type the same again"
        )


def _work(options: ReproduceOptions, progress: Any) -> Work:
    from benchmarks.paper.reproducing.listing import TINY_ROOM
    from benchmarks.paper.reproducing.models import Models
    from benchmarks.paper.reproducing.work import Heard, Work

    room = Path(options.room) / TINY_ROOM if options.tiny else Path(options.room)
    folder = None if options.models is None else Path(options.models)
    benchmarks: dict[str, Any] = {}
    if options.task_data:
        benchmarks["data"] = named_files(options.task_data)
    if options.judge:
        benchmarks["judge"] = options.judge
    if options.judge_prompts:
        from benchmarks.paper.evaluation.judge import read_prompts

        benchmarks["prompts"] = read_prompts(options.judge_prompts)
    work = Work(
        room,
        Models(folder, options.tiny, room / "models"),
        _size(options),
        data=tuple(options.data or ()),
        texts=tuple(options.text or ()),
        given=None if options.translators is None else Path(options.translators),
        benchmarks=benchmarks,
        device=options.device,
        processes=options.processes,
        heard=Heard(say, warn, progress),
    )
    if options.processes and work.trains not in ("cuda", "cpu"):
        raise ValueError(
            f"--processes are torchrun's, and {work.trains} trains here: add --device cuda or cpu, "
            "or leave it out"
        )
    return work


def _size(options: ReproduceOptions) -> Size:
    """The paper's size or the tiny one, but for what is smaller by an option."""
    from dataclasses import replace

    from benchmarks.paper.reproducing.work import PAPERS, TINY

    asked = {name: n for name, n in options.some("steps items seeds").items() if n is not None}
    return replace(TINY if options.tiny else PAPERS, **asked)


def _list(options: ReproduceOptions, found: list[Listed]) -> None:
    """Print what each takes: of all a line or less, of those that are named everything."""
    from benchmarks.paper.reproducing import listing

    labels = [entry.label for entry in listing.named(options.labels or [])]
    for one in found:
        if one.label in labels:
            say(f"{one.label}: {one.title}")
            for name, text in one.whole:
                say(f"  {name}: {text}")
    for line in [] if labels else listing.overview(found):
        say(line)
    keep(options.json_file, "reproduce_list", {}, [vars(one) for one in found])


def _show(label: str, title: str, found: Result) -> None:
    from benchmarks.paper.reproducing.results import cells

    width = len(found.titles)
    rows = []
    for line in found.lines:
        names = [""] * (width - len(line.names)) + list(line.names)
        rows.append([*names, *cells(line)])
    table(f"{label}: {title}", [*found.titles, *found.columns], rows)
    for note in dict.fromkeys(found.notes):
        say(note)
