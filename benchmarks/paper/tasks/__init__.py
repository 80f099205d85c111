"""lm-eval task files for the paper's benchmarks that lm-eval lacks (appendix "Evaluation data").

The YAML files here say where the data come from at run time; a local file of the same schema may
replace each source. No data set could be fetched when this was written: ids, revisions and field
names follow the public data cards, and were tested on small local files only.
"""

from pathlib import Path

from kvlingo_mlx.evaluation.harness.task_loading import AddedTasks

JUDGED = (  # a model judges the free answers
    "mt_bench_101",
    "longmemeval",
    "longmemeval_rungs",
    "repliqa",
    "repliqa_facts",
    "repliqa_all",
    "multichallenge",
)
CHATS = (  # our own code reads their records, and can draw some
    "quac",
    "coqa_last_turn",
    "xquad_languages",
    "mmlu_pro_written",
    "arc_challenge_written",
    "longbench_v2_written",
    *JUDGED,
)
NAMES = (*CHATS, "squad_v1")
# A run's metadata may say to these tasks: ``draw``, how many records are drawn; ``tokenizer``, what
# counts tokens; ``rungs``, the lengths of LongMemEval's histories.

# The words with which the question begins in a context that has its document first; the last place
# in a context where they stand counts. What stands before them can be translated alone.
MAGIC = "\nWhat are all the special magic "
NIAH = "single_1 single_2 single_3 multikey_1 multikey_2 multikey_3 multivalue multiquery".split()
QUESTION_AT = {
    "needles": MAGIC,
    **{f"niah_{kind}": MAGIC for kind in NIAH},
    "longmemeval": "\n\nToday is ",
    "longmemeval_rungs": "\n\nToday is ",
    "longbench_v2_written": "\n\nQuestion: ",
    "repliqa": "\n\nQuestion: ",
    "repliqa_facts": "\n\nQuestion: ",
    "repliqa_all": "\n\nQuestion: ",
}

ADDED = AddedTasks(Path(__file__).parent, CHATS)

QUAC_TURNS = 8  # turns used of a dialogue, as in the paper
QUAC_INSTRUCTION = (
    "Answer each question about the text with a short passage copied from it. If the text does "
    "not answer the question, reply CANNOTANSWER."
)
