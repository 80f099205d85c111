"""Models of kvlingo-mlx for llm: ``llm -c -m OTHER`` hands the conversation over by translation.

llm is a new process at each call, so what the models hold of a conversation is saved in a folder
that bears the conversation's id, and is resumed there. llm's own history is what counts: a model
reads whatever the folder lacks, and where there is none, everything.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import llm
from llm.parts import TextPart

MOST = 20  # conversations that are kept
COUNTS = ("cached_tokens", "translated_tokens", "read_tokens")
_talks: dict[str, Any] = {}  # by the conversation's id, for `llm chat`, which is one process


def _models() -> dict[str, str]:
    """The models by name: folders, Hub ids or names of embedded ones."""
    file = llm.user_dir() / "kvlingo-models.json"
    return json.loads(file.read_text()) if file.exists() else {}


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    """Add `llm kvlingo`."""

    @cli.command("kvlingo")
    @click.argument("models", nargs=-1, metavar="NAME=MODEL...")
    def kvlingo(models: tuple[str, ...]) -> None:
        """Set the models that take conversations over from one another; without any, list them."""
        named = dict(model.partition("=")[::2] for model in models)
        if not all(name and path for name, path in named.items()):
            raise click.ClickException("give NAME=MODEL: small=Qwen/Qwen3-1.7B")
        if named:
            (llm.user_dir() / "kvlingo-models.json").write_text(json.dumps(named))
        for name, path in _models().items():
            click.echo(f"{name}={path}")


@llm.hookimpl
def register_models(register: Any) -> None:
    """Register each model under its name."""
    for name in _models():
        register(KVLingo(name))


class KVLingo(llm.Model):
    """A model that takes a conversation over from the others."""

    can_stream = True

    class Options(llm.Options):
        """What an answer may be given."""

        max_tokens: int = 1024
        temperature: float = 0.0
        thinking: bool = False

    def __init__(self, name: str) -> None:
        self.model_id = name

    def __str__(self) -> str:
        return f"KV-Lingo: {self.model_id}"

    def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any = None
    ) -> Iterator[str]:
        """Answer, and tell llm how many tokens were cached, translated and read."""
        folder = llm.user_dir() / "kvlingo" / conversation.id if conversation else None
        talk = _talk(folder)
        from mlx_lm.sample_utils import make_sampler  # after kvlingo_mlx, which chooses a BLAS

        options, last = prompt.options, None
        for last in talk.stream_reply(
            self.model_id,
            messages=[_plain(message) for message in prompt.messages],
            max_tokens=options.max_tokens,
            sampler=make_sampler(temp=options.temperature),
            enable_thinking=options.thinking,
        ):
            if last.content:
                yield last.content
        if last is not None:
            counts = {name: getattr(last, name) for name in COUNTS}
            tokens = {"input": last.prompt_tokens, "output": last.generation_tokens}
            response.set_usage(**tokens, details={"kvlingo": counts})
        if folder is not None:
            _save(talk, folder)


def _plain(message: Any) -> dict[str, str]:
    """A message of llm's, as chat templates have them; pictures and tools are left out."""
    texts = [part.text for part in message.parts if isinstance(part, TextPart)]
    return {"role": message.role, "content": "".join(texts)}


def _talk(folder: Path | None) -> Any:
    """The conversation of a folder; a new one where it cannot be gone on with.

    It is one of all models, since what a model reads can be translated for those alone.
    """
    import kvlingo_mlx as kv

    if folder is not None and folder.name in _talks:
        return _talks[folder.name]
    models = _models()
    options = {"on_missing": "reprefill", "eager": False} if len(models) > 1 else {}
    if folder is not None and folder.exists():
        try:
            return kv.Conversation.resume(folder, models, **options)
        except (kv.KVLingoError, ValueError) as error:  # another model or version, or damage
            click.echo(f"warning: the conversation is read again ({error})", err=True)
            shutil.rmtree(folder)
    return kv.Conversation(models, **options)


def _save(talk: Any, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    talk.save(folder)
    _talks[folder.name] = talk
    kept = sorted(folder.parent.glob("[!.]*"), key=lambda path: path.stat().st_mtime)
    for old in kept[:-MOST]:
        shutil.rmtree(old, ignore_errors=True)
