"""The section on the paper's tables and figures, made on tiny models."""

from __future__ import annotations

from rendering.records import records, source, table

READERS = ("native", "closed form", "trained")


def reproductions() -> str:
    """Every label's tiny run: how much of it was made, and what caches scored."""
    found = records("reproductions")
    if not found:
        return ""
    rows = []
    latest = {e["label"]: e for record in found for e in record["results"]["entries"]}
    for entry in latest.values():
        means = entry.get("means", {})
        scores = [f"{means[name]:.2f}" if name in means else "" for name in READERS]
        count = f"{entry['made']} of {entry['numbers']}" if not entry["status"] else entry["last"]
        facts = [f"`{entry['label']}`", entry["maker"], count, f"{entry['seconds']:.0f}"]
        rows.append([*facts, *scores])
    return "\n".join([
        "## The paper's tables and figures on tiny models\n",
        "`python -m benchmarks.paper --tiny` for every label that needs no vLLM: six steps a\n"
        "training, two items a benchmark. The scores say that the way is whole, not how good a\n"
        "method is; a label whose translators or answers an earlier one made takes less time.\n",
        table(["label", "maker", "numbers made", "seconds", *READERS], rows),
        *map(source, found),
    ])  # fmt: skip
