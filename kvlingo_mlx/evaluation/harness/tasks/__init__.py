"""lm-eval task files for the paper's benchmarks that lm-eval lacks (appendix "Evaluation data").

The YAML files here say where the data come from at run time; a local file of the same schema may
replace each source. No data set could be fetched when this was written: ids, revisions and field
names follow the public data cards, and were tested on small local files only.
"""

NAMES = ("quac", "mt_bench_101", "longmemeval", "repliqa", "repliqa_facts", "multichallenge")
JUDGED = NAMES[1:]  # a model judges the free answers
