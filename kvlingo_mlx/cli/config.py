"""``--config``: options and keys from a file or as KEY=VALUE; and the help, in groups.

A key is an option that is typed as ``-c KEY=VALUE``. It is checked as a flag is, since click reads
both into the same parameter, and may be typed as one, too.
"""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from kvlingo_mlx.options import read_table

# Where an option stands in --help, the same in every verb; others are in the first group.
GROUPS = {
    "Sampling and seed": "temperature top_p top_k min_p seed stop",
    "Translation": "translator quantize strategy native_layers allow_mismatch max_kl min_recall",
    "Speed and memory": "kv_bits draft_model prefill_step_size memory_limit memory_gb "
    "max_concurrent device dtype batch_size time_limit",
    "Network": "host port api_key allow_anyone cors max_jobs write_timeout",
    "Output and settings": "json_file plot log_level conversations keep_conversations force config",
}
HEADING = "Keys of --config (-c KEY=VALUE, or a TOML or JSON file of KEY = VALUE)"
HINT = "; give a TOML or JSON file, or KEY=VALUE"


def key_of(parameter: Any) -> str:
    """What an option is called in a file: its first long spelling with underscores."""
    return str(parameter.opts[0]).lstrip("-").replace("-", "_")


def is_key(parameter: Any) -> bool:
    """Whether an option is a key."""
    return bool(getattr(parameter, "hidden", False))


def spelled(parameter: Any, value: Any = None) -> str:
    """An option as it is typed, with a value unless that is None."""
    if is_key(parameter):
        return key_of(parameter) if value is None else f"-c {key_of(parameter)}={_text('', value)}"
    if value is False and parameter.secondary_opts:
        return str(parameter.secondary_opts[0])
    return parameter.opts[0] + ("" if value is None or isinstance(value, bool) else f" {value}")


def read_config(context: typer.Context, given: list[str] | None) -> None:
    """Make what ``--config`` says the verb's defaults; flags that are typed go over them.

    Raises:
        ValueError: A file cannot be read, or a key is unknown or no value.
    """
    options = (p for p in context.command.params if p.param_type_name == "option")
    known = {key_of(p): p for p in options if p.name != "config"}
    values: dict[str, Any] = {}
    for text in given or ():
        key, mark, value = text.partition("=")
        if mark and not Path(text).is_file():
            parameter = _known(key, known, "--config")
            several = values.get(parameter.name, []) if parameter.multiple else ()
            values[parameter.name] = [*several, value] if parameter.multiple else value
        else:
            for key, value in read_table(text, "--config", HINT).items():
                parameter = _known(key, known, text)
                values[parameter.name] = _text(f"{text}: {key}", value, parameter.multiple)
    context.default_map = values


def _known(key: str, known: Mapping[str, Any], where: str) -> Any:
    key = key.strip().replace("-", "_")
    for name in (key, key.removesuffix("s")):  # lists and tables are plural in a file
        if name in known:
            return known[name]
    close = difflib.get_close_matches(key, known, 1, 0.6)
    expected = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
    raise ValueError(f"{where}: unknown key {key!r}; {expected}")


def _text(where: str, value: Any, multiple: bool = False) -> Any:
    """A value of a file as it would be typed, so that it is checked as a flag's is."""
    if isinstance(value, dict) and multiple:  # a table is KEY=VALUE for each of its entries
        inner = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in value.items()}
        value = [f"{key}={_text(f'{where}.{key}', each)}" for key, each in inner.items()]
    if isinstance(value, list):
        texts = [_text(where, one) for one in value]
        return texts if multiple else ",".join(texts)
    if not isinstance(value, str | int | float):
        raise ValueError(f"{where} is {value!r:.60}; give a text, a number, true or false")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return [text] if multiple else text


def write_help(command: Any, context: Any, formatter: Any) -> None:
    """Write a verb's arguments and options into its help, by groups."""
    group_of = {name: group for group, names in GROUPS.items() for name in names.split()}
    rows: dict[str, list[tuple[str, str]]] = {
        group: [] for group in ("Arguments", "Options", *GROUPS, HEADING)
    }
    for parameter in command.get_params(context):
        if is_key(parameter):
            group, record = HEADING, _key_row(parameter, context)
        else:
            of_words = parameter.param_type_name == "argument"
            group = "Arguments" if of_words else group_of.get(parameter.name, "Options")
            record = parameter.get_help_record(context)
        if record:
            rows[group].append((record[0].replace("<list[str]>", "<str>..."), record[1]))
    for group, listed in rows.items():
        if listed:
            with formatter.section(group):
                formatter.write_dl(listed, col_max=26)


def _key_row(parameter: Any, context: Any) -> tuple[str, str]:
    """A key with its type, and what it does."""
    parameter.hidden = False
    flag, text = parameter.get_help_record(context)
    parameter.hidden = True
    key, name = key_of(parameter), parameter.opts[0][2:]
    kind = "<bool>" if parameter.is_flag else flag.rpartition(" ")[2]
    for word, value in ((f"no-{name}", "false"), (name, "true")):
        text = text.replace(f"[default: {word}]", f"[default: {value}]")
    return f"{key} {kind}", text
