"""Render benchmarks/RESULTS.md, which is not committed, from the records under benchmarks/results.

    python benchmarks/render_results.py

Every number on that page comes from a record, beside the command that made it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from rendering.bench import benches, memory_budgets
from rendering.conversations import conversations
from rendering.guards import guards, trained_lengths
from rendering.healing import healing
from rendering.machines import remote_prefills
from rendering.made_pairs import made_pairs
from rendering.pairs import made, ridges, starts
from rendering.peers import options, peer_fits, peers
from rendering.promises import alignment, checks, fit_memory, folded, ratios, streams, threads
from rendering.quality import (
    across_tokenizers,
    analyses,
    closed_forms,
    evaluations,
    families,
    folded_recalls,
    hybrids,
    objectives,
)
from rendering.records import HERE
from rendering.recurrent import recurrent
from rendering.reproductions import reproductions
from rendering.serving import faults, recalls, served
from rendering.speed import gpu_switches, switches, throughput, training_memory, windows

PAGE = HERE / "RESULTS.md"
HEAD = """# Results

Rendered by `python benchmarks/render_results.py` from the records under results/. The models are
the tiny embedded ones (`kvlingo_mlx/embedded`), so this page says how methods compare, not how well
they do on models that people use. Nothing here was measured on Apple hardware.
"""


def main() -> None:
    sections = [
        HEAD,
        closed_forms(),
        families(),
        alignment(),
        across_tokenizers(),
        recurrent(),
        made_pairs(),
        hybrids(),
        objectives(),
        streams(),
        made(),
        starts(),
        ridges(),
        options(),
        peers(),
        peer_fits(),
        throughput(),
        training_memory(),
        windows(),
        conversations(),
        healing(),
        guards(),
        trained_lengths(),
        switches(),
        remote_prefills(),
        served(),
        recalls(),
        faults(),
        benches(),
        gpu_switches(),
        folded(),
        memory_budgets(),
        folded_recalls(),
        ratios(),
        checks(),
        threads(),
        fit_memory(),
        evaluations(),
        analyses(),
        reproductions(),
    ]
    PAGE.write_text("\n".join(section for section in sections if section))


if __name__ == "__main__":
    main()
