"""The section on a source on another machine."""

from __future__ import annotations

from rendering.records import records, source, table

WAYS = ("streamed", "after")


def remote_prefills() -> str:
    """Time to first token by the network's rate, streamed and sent after the prefill."""
    found = records("remote_prefill")
    latest = {bool(record["config"]["pace"]): record for record in found}
    if not latest:
        return ""
    parts = [
        "## A source in another process\n",
        "Seconds to the first token where `serve-prefill` reads and a proxy lets so many bytes a\n"
        "second through; beside each what the formula says, from a local hand-over's times in the\n"
        "same chunks. *Sent after*: the same prompt in one chunk. Loopback, one core for both\n"
        "processes; not measured on Apple hardware, nor on two machines.\n",
    ]
    for is_paced, record in latest.items():
        config, results = record["config"], record["results"]
        chunks, received = config["chunks"], results["received"]
        each = results["local"]["streamed"]
        told = f"{received['bytes'] / received['tokens']:,.0f} bytes a token ({received['sent']})"
        title = "two machines, played" if is_paced else "one core for both"
        how = (
            "Reading and translating sleep as long as they would take elsewhere, so neither waits\n"
            "for the other's processor: r + s + t + (n - 1) max(r, s, t)."
            if is_paced
            else "Random models that compute; they share the core, so r and t are in turns:\n"
            "r + s + t + (n - 1) max(r + t, s)."
        )
        rows = [
            [f"{row['rate']:g}", f"{row['streamed']['send_s']:.2f}",
             *(f"{row[way][name]:.2f}" for way in WAYS for name in ("ttft_s", "formula_s")),
             f"{row['gain']:.2f}", f"{row['formula_gain']:.2f}",
             f"{row['gain'] / row['formula_gain']:.0%}"]
            for row in results["rows"]
        ]  # fmt: skip
        parts += [
            f"### {title[0].upper()}{title[1:]}\n",
            f"{how} {config['tokens']:,} tokens in n = {chunks} chunks, {told}; r = "
            f"{each['read_s']:.2f} s, t = {each['translate_s']:.2f} s. "
            f"Medians of {config['runs']}.\n",
            table(["MB a second", "s", "streamed", "formula", "sent after", "formula", "sooner by",
                   "formula", "of it"], rows),
            source(record),
        ]  # fmt: skip
    return "\n".join(parts)
