"""lm-eval task files for benchmarks of the paper that lm-eval lacks (appendix "Evaluation data").

The YAML files here say where the data come from at run time; a local file of the same schema
may stand in for each. No data set could be fetched where this was written: ids, revisions and
field names are those of the public data cards, and were tried on small local files only.
"""

NAMES = ("quac", "mt_bench_101", "longmemeval", "repliqa", "repliqa_facts", "multichallenge")
JUDGED = NAMES[1:]  # a model says how good a free answer is
