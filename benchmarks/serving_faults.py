"""Does `kvlingo-mlx serve` stay right under clients of all kinds, and kills?

    python benchmarks/serving_faults.py [--minutes 30] [--clients 32] [--kills 200] [--seed 0]
        [--json FILE]

The real verb runs with the three embedded models; 0 of a thing leaves it out.

- Soak: clients switch models, edit, branch, leave before and in mid-answer, read slowly, send
  rubbish and too much, load and unload, within a memory in which lines go to 8 bits and to disk and
  models come and go. Greedy answers are compared with plain mlx-lm reading the same prompt: exactly
  (up to ties) where the model had read it all itself, and within what 8 bits change where the
  conversation had one model. Two clients pin their conversations, so those stay exact, and the
  library's `Conversation` does the same beside it, token for token. The memory of both processes in
  the last quarter of the time is told against that in the second. After a stop and a start, all go
  on with their conversations.
- Kills: the server, its parent, or both, by SIGKILL at random moments: loading, answering, saving.
  Clients hear why, or lose the connection; then all go on, what was saved is not read anew, answers
  are right as above, and nothing but whole conversations lies in the folder. Ctrl-C ends it early.

Requests that are changed by chance are read by tests/serving/test_wire_fuzz.py. A record "fuzz" is
of a third part, which sent such requests to all endpoints until 2026-11-28.

What is wrong is printed and counted; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from faults import kills, soak

from kvlingo_mlx.reporting import measure

GROWTH = 0.05  # of either process's memory, from the second quarter to the last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="append the record to this file")
    args = parser.parse_args()
    seed = args.seed
    parts = {
        "soak": (args.minutes, lambda room: soak.run(room, args.minutes, args.clients, seed)),
        "kills": (args.kills, lambda room: kills.run(room, args.kills, seed)),
    }
    found = {}
    for name, (wanted, run) in parts.items():
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as root:
            found[name] = run(Path(root))
        print(json.dumps({name: found[name]}, indent=1), flush=True)
        if args.json:  # at once: the next part may fail
            config = {k: v for k, v in vars(args).items() if k != "json"} | {"part": name}
            record = measure.record("serving_faults", config, {name: found[name]})
            measure.append_json(args.json, record)
    print(measure.machine_line())
    grew = max((v for k, v in found.get("soak", {}).items() if k.endswith("grew")), default=0.0)
    faults = sum(each["wrong"] + each["tracebacks"] for each in found.values())
    sys.exit(1 if faults or grew > GROWTH else 0)


if __name__ == "__main__":
    main()
