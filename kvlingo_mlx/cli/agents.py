"""kvlingo-mlx agents: set up programs that talk to `serve`, and put back what they had."""

import difflib
import json
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import ClassVar

from kvlingo_mlx.cli.command import VerbOptions, verb
from kvlingo_mlx.cli.output import keep, say, table
from kvlingo_mlx.errors import printable
from kvlingo_mlx.options import Need, off, option

ASKED_S = 3.0  # how long a server is waited for


@dataclass(frozen=True, kw_only=True)
class AgentsOptions(VerbOptions):
    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("plan build url setup", "remove", off),
        Need("force", "setup remove", lambda setup, remove: setup or remove, True),
    )
    agent: str | None = option(None, "Which one; without a name all are listed.", word=True)
    setup: bool = option(False, "Write its configuration file.", "--setup")
    remove: bool = option(False, "Put back what that file was.", "--remove")
    plan: str | None = option(None, "The model that plans, by its name at the server.")
    build: str | None = option(None, "The model that builds.")
    url: str | None = option(None, "The server; default: http://localhost:8080.")
    force: bool = option(False, "Also where somebody changed the file since.", "--force")


@verb(AgentsOptions)
def command(options: AgentsOptions) -> None:
    """Set up an agent for two models of a running server, or put back what it had.

    Without --setup or --remove it shows what would be written. The server's key is that of
    KVLINGO_API_KEY.
    """
    from kvlingo_mlx.agents import agents, files
    from kvlingo_mlx.format.atomic import followed

    name, known = options.agent, agents()
    if name is None and not {*options.given()} - {"json_file"}:
        facts = {n: (a.found, files.note_of(n).exists()) for n, a in known.items()}
        rows = [(n, *("yes" if fact else "-" for fact in both)) for n, both in facts.items()]
        table("Agents", ("name", "found here", "set up"), rows)
        keep(options.json_file, "agents", {}, facts)
        return
    if name not in known:
        raise ValueError(f"the agent is {name!r:.80}; name one of {', '.join(known)}")
    agent, place = known[name], files.set_up(name)
    if options.remove:
        if place is None:
            raise ValueError(f"{name} is not set up; `kvlingo-mlx agents` lists what is")
        _show(*place, options)
        files.put_back(name)
        say(f"{agent.title} is as it was")
        return
    offer = _offer(options)
    if agent.path is not None:
        path = followed(agent.path)
        before = place[1] if place and place[0] == path else files.content(path)
        snippet = agent.snippet(offer)
        try:
            then = agent.put((before or b"").decode(), snippet).encode()
        except ValueError as why:
            say(snippet)
            raise ValueError(f"{path} stays as it is ({why}); put in what is above") from None
        _show(path, then, place is not None and place[2], options)
        if options.setup:
            files.write(name, path, then)
        else:
            say("nothing is written yet: add --setup")
    say(f"then: {Template(agent.then).substitute(offer)}")
    keep(options.json_file, "agents", options.some("agent setup"), offer)


def _show(path: Path, then: bytes | None, changed: bool, options: AgentsOptions) -> None:
    """Show how a file will change; refuse to lose what somebody changed in it."""
    from kvlingo_mlx.agents.files import content

    old, new = ((b or b"").decode(errors="replace").splitlines() for b in (content(path), then))
    for line in difflib.unified_diff(old, new, str(path), f"{path}, then", lineterm=""):
        say(printable(line.expandtabs(4)))
    if changed and (options.setup or options.remove) and not options.force:
        raise ValueError(
            f"{path} was changed since it was set up, and would become what is shown above; add "
            "--force, or take out by hand what is kvlingo's"
        )


def _offer(options: AgentsOptions) -> dict[str, str]:
    """The server's address and key, the two models' names, and how many tokens each holds."""
    url = (options.url or "http://localhost:8080").rstrip("/").removesuffix("/v1")
    key = os.environ.get("KVLINGO_API_KEY") or "none"
    request = urllib.request.Request(f"{url}/v1/models", headers={"x-api-key": key})
    try:
        with urllib.request.urlopen(request, timeout=ASKED_S) as reply:
            models = {m["id"]: m["kvlingo"]["context"] for m in json.load(reply)["data"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{url} does not tell its models ({error}); start `kvlingo-mlx serve A=MODEL B=MODEL` "
            "and wait until it is ready, or say with --url where it listens"
        ) from None
    plan, build = options.plan or "", options.build or ""
    if not {plan, build} <= models.keys() or plan == build:
        raise ValueError(f"the server has {', '.join(models)}; name two: --plan A --build B")
    offer = {"url": url, "key": key, "plan": plan, "build": build}
    for task, model in (("plan", plan), ("build", build)):
        offer |= {f"{task}_context": f"{models[model]}", f"{task}_output": f"{models[model] // 4}"}
    return offer
