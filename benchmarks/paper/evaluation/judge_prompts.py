"""The prompts for a judge, and the forms of its replies (appendix "Evaluation data").

The questions are each benchmark's own; the wording is ours. To use a benchmark's own wording, pass
it to :func:`.judge.judge_answers` under the names defined here.
"""

from __future__ import annotations

from dataclasses import dataclass

BRACKETED = (
    "Explain briefly, then end with your verdict in double square brackets: [[yes]] or [[no]]."
)


@dataclass(frozen=True)
class Template:
    """A prompt with named places, one of them ``{answer}``.

    Attributes:
        text: The prompt, for ``str.format``.
        verdict: The form of the reply: a parser's name in :mod:`.judge`.
        metric: The name of the score.
    """

    text: str
    verdict: str
    metric: str


# ---- MT-Bench-101: one turn, 1 to 10 ------------------------------------------------------

ABILITIES = {
    "CM": "Context memory: does the reply recall what was said earlier wherever that matters, and "
    "stay consistent with it? Where nothing had to be recalled, do not hold that against it.",
    "AR": "Anaphora resolution: does the reply understand what the user's references to earlier "
    "turns stand for, and answer correctly in that sense?",
    "SI": "Separate input: the first turn names a task without its content, later turns bring the "
    "content alone. A first reply should ask or wait for the content; a later one should "
    "carry out the task on it, correctly.",
    "TS": "Topic shift: does the reply follow the user to a new topic, complete and to the point, "
    "without being drawn back to the old one?",
    "CC": "Content confusion: earlier questions look like the current one and mean something "
    "else. Is the reply true, and about the current question alone?",
    "CR": "Content rephrasing: does the rewritten text keep the meaning of the first reply, and "
    "meet what the user now asks of the wording?",
    "FR": "Format rephrasing: does the rewritten text keep the meaning of the first reply, and "
    "have the form that the user now asks for?",
    "SC": "Self-correction: the user points out a mistake in an earlier reply. Does this reply "
    "examine it, admit it and give a corrected, accurate answer?",
    "SA": "Self-affirmation: the user wrongly disputes an earlier, correct reply. Does this reply "
    "take up the objection, and hold to the right answer with sound reasons?",
    "MR": "Mathematical reasoning: is the result that of the reference solution, and is every step "
    "sound, complete and clear, with what earlier turns provide?",
    "GR": "General reasoning: is the conclusion that of the reference solution, and is the "
    "argument sound, complete and clear, with what earlier turns provide?",
    "IC": "Instruction clarification: where the request is vague, does the reply ask for what is "
    "missing, and where it is clear, answer it in full?",
    "PI": "Proactive interaction: besides answering, does the reply carry the conversation on with "
    "fitting questions or suggestions, without taking it over?",
}

RATING = (
    "You are an impartial judge. Below is a conversation; everything up to the user's last "
    "message is given and not to be judged. Rate the assistant's reply to that last message, and "
    "nothing else, by this ability.\n\n{ability}\n\n"
    "Scale: 1 to 3, fails at it; 4 to 6, manages it in part; 7 to 9, does it well but for small "
    "faults; 10, does it perfectly.\n\n"
    "<conversation>\n{{conversation}}\n</conversation>\n\n{reference}"
    "<reply>\n{{answer}}\n</reply>\n\n"
    "Explain your rating briefly, then end with it in this form: Rating: [[n]], where n is a whole "
    "number from 1 to 10."
)
SOLUTION = "<reference solution>\n{reference}\n</reference solution>\n\n"


def _rating(task: str, ability: str) -> Template:
    reference = SOLUTION if task in ("GR", "MR") else ""
    return Template(RATING.format(ability=ability, reference=reference), "rating", "rating")


# ---- LongMemEval: right or wrong ----------------------------------------------------------

RIGHT = (
    "You get a question, the correct answer and a model's response. The verdict is yes if the "
    "response contains the correct answer, says the same in other words, or holds every step that "
    "leads to it; it is no if the response lacks any part of the required information.{extra}\n\n"
    "Question: {{question}}\n\nCorrect answer: {{reference}}\n\nModel response: {{answer}}\n\n"
    "Is the response correct? " + BRACKETED
)
PLAIN = ""
DAYS = (
    " Do not count it against the response when a number of days, weeks or months is off by one "
    "(19 days where the answer is 18)."
)
UPDATED = (
    " A response that also mentions earlier, outdated information is right if the updated answer "
    "it gives is the required one."
)
PREFERENCE = (
    "You get a question, a rubric of the personal response the user would like, and a model's "
    "response. The verdict is yes if the response recalls the user's personal information and "
    "uses it correctly; it need not meet every point of the rubric.\n\n"
    "Question: {question}\n\nRubric: {reference}\n\nModel response: {answer}\n\n"
    "Does the response satisfy it? " + BRACKETED
)
ABSTENTION = (
    "You get a question that cannot be answered, an explanation of why, and a model's response. "
    "The verdict is yes if the response recognises that it cannot be answered, for instance by "
    "saying that the information is missing or that only something else is known.\n\n"
    "Question: {question}\n\nExplanation: {reference}\n\nModel response: {answer}\n\n"
    "Does the response recognise this? " + BRACKETED
)
MEMORY = {
    "single-session-user": RIGHT.format(extra=PLAIN),
    "single-session-assistant": RIGHT.format(extra=PLAIN),
    "multi-session": RIGHT.format(extra=PLAIN),
    "temporal-reasoning": RIGHT.format(extra=DAYS),
    "knowledge-update": RIGHT.format(extra=UPDATED),
    "single-session-preference": PREFERENCE,
    "abstention": ABSTENTION,
}

# ---- RepLiQA: right or wrong, or the share of key facts -------------------------------------

CORRECT = (
    "You get a question about a document, the reference answer and a model's answer. The verdict "
    "is yes if the model's answer says what the reference says, in whatever words and with "
    "whatever further true detail; it is no if it contradicts the reference, misses its point or "
    "gives no answer.\n\n"
    "Question: {question}\n\nReference: {reference}\n\nAnswer: {answer}\n\n"
    "Is the answer correct? " + BRACKETED
)
FACTS = (
    "You get a question about a document, the reference answer and a model's answer.\n"
    "First split the reference into its key facts, numbered. Then say of each whether the model's "
    "answer conveys it, in whatever words.\n\n"
    "Question: {question}\n\nReference: {reference}\n\nAnswer: {answer}\n\n"
    "End with how many of the facts are conveyed and how many there are, in this form: "
    "Facts: [[conveyed/all]], for instance Facts: [[2/3]]."
)

UNANSWERABLE = (
    "You get a question about a document, and a model's answer. The document does not answer the "
    "question. The verdict is yes if the model's answer says so, in whatever words; it is no if it "
    "gives an answer all the same.\n\n"
    "Question: {question}\n\nAnswer: {answer}\n\n"
    "Does the answer say that the document does not tell? " + BRACKETED
)

# ---- MultiChallenge: passed or not --------------------------------------------------------

PASS = (
    "A model's response has to meet one criterion, put as a question with the answer yes or no. "
    "Be very strict.\n\n<response>\n{answer}\n</response>\n\n"
    "<criterion>\n{criterion}\n</criterion>\n\n" + BRACKETED
)

TEMPLATES = {
    **{f"mt_bench_101/{task}": _rating(task, text) for task, text in ABILITIES.items()},
    **{
        f"longmemeval/{kind}": Template(text, "yes_no", "accuracy") for kind, text in MEMORY.items()
    },
    "repliqa/correct": Template(CORRECT, "yes_no", "correct"),
    "repliqa/unanswerable": Template(UNANSWERABLE, "yes_no", "correct"),
    "repliqa/facts": Template(FACTS, "fraction", "fact_coverage"),
    "multichallenge": Template(PASS, "yes_no", "pass"),
}
