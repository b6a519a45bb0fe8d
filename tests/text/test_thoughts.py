"""Thoughts and answers: told apart in every split, stops and grammars after the thought, a budget that ends it."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken

from cb_backend.params import SamplingParams, Thinking
from cb_backend.request import FinishReason, TokenDelta
from cb_backend.text.grammar import GrammarCompiler
from cb_backend.text.output import OutputBuilder, OutputCollector
from cb_backend.text.thought_constraint import ThoughtConstraint
from cb_backend.text.thoughts import THOUGHTS, ThoughtSplitter, opened_by, shown_thoughts
from tests.tiny_models import VOCAB_SIZE, build_tokenizer

TOKENIZER = build_tokenizer()
THOUGHT = "Is it <b>?\n\nI call <tool_call>no</tool_call>"


def parted(name: str, opened: bool, pieces: list[str]) -> tuple[str, str]:
    splitter = ThoughtSplitter(THOUGHTS[name], opened)
    got = [*(one for piece in pieces for one in splitter.push(piece)), *splitter.finish()]
    return "".join(text for thought, text in got if thought), "".join(text for thought, text in got if not thought)


# (format, opened by the prompt, what the model wrote, its thought, its answer)
ROWS = [
    ("think", False, f"<think>\n{THOUGHT}\n</think>\n\nYes <think>.", THOUGHT, "Yes <think>."),
    ("think", True, f"{THOUGHT}\n</think>\n\nYes.", THOUGHT, "Yes."),
    ("think", True, "", "", ""),
    ("think", True, "It goes on </thin", "It goes on </thin", ""),
    ("think", False, " \nNo thought <think>", "", " \nNo thought <think>"),
    ("think", False, "<thi", "", "<thi"),
    ("think", False, "\n<think>\n\n</think>\n\nYes", "", "Yes"),
    ("reasoning", False, f"<reasoning>{THOUGHT}</reasoning>Yes", THOUGHT, "Yes"),
    ("mistral", False, f"[THINK]{THOUGHT}[/THINK]Yes", THOUGHT, "Yes"),
    ("seed", True, f"{THOUGHT}</seed:think>Yes", THOUGHT, "Yes"),
    ("kimi", False, f"◁think▷{THOUGHT}◁/think▷Yes", THOUGHT, "Yes"),
    ("granite", False, f"Here is my thought process: {THOUGHT} Here is my response: Yes", THOUGHT, "Yes"),
    (
        "harmony",
        False,
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        THOUGHT,
        "Yes",
    ),
    (
        "harmony",
        False,
        "<|channel|>commentary<|message|>Look.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
        "Hm",
        "Look.<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
    ),
]


@pytest.mark.parametrize(("name", "opened", "written", "thought", "answer"), ROWS)
def test_thought_and_answer_in_every_split(name: str, opened: bool, written: str, thought: str, answer: str) -> None:
    assert parted(name, opened, [written]) == (thought, answer)
    assert parted(name, opened, list(written)) == (thought, answer)
    for i in range(1, len(written)):
        assert parted(name, opened, [written[:i], written[i:]]) == (thought, answer)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|channel|>analysis", "harmony"),
        ("[THINK]", "mistral"),
        ("<seed:think>", "seed"),
        ("◁think▷", "kimi"),
        ("Here is my thought process:", "granite"),
        ("<reasoning>", "reasoning"),
        ("{{ '<think>' }}", "think"),
        ("content.split('</think>')", "think"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_format(template: str, name: str | None) -> None:
    found = shown_thoughts(template)
    assert (found and found.name) == name


def test_a_prompt_opens_a_thought_only_at_its_end() -> None:
    assert opened_by("<|im_start|>assistant\n<think>\n", THOUGHTS["think"])
    assert not opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n", THOUGHTS["think"])


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def test_stops_are_looked_for_in_the_answer_only_and_its_tokens_are_counted_apart() -> None:
    thought = ids_of("a stop b</think>")
    ids = [*thought, *ids_of("c stop d")]
    params = SamplingParams(stop="stop", thinking=Thinking(format="think", opened=True))
    builder, collector = OutputBuilder(TOKENIZER, params, "r", (5,)), OutputCollector()
    for i, token_id in enumerate(ids):
        reason = FinishReason.LENGTH if i == len(ids) - 1 else None
        delta = builder.feed(TokenDelta("r", 0, (token_id,), finish_reason=reason))
        if delta is not None:
            collector.add(0, delta)
    output = collector.output(0)
    assert (output.reasoning, output.text, output.stop_reason) == ("a stop b", "c ", "stop")
    assert output.usage.reasoning_tokens == len(thought)
    assert output.usage.completion_tokens > len(thought)


def test_special_tokens_that_mark_something_are_shown_and_others_are_not() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken("[THINK]", special=True), AddedToken("[/THINK]", special=True)])
    params = SamplingParams(
        thinking=Thinking(format="mistral"), shown_special_tokens=("[THINK]", "[/THINK]", "[NOT THERE]")
    )
    builder = OutputBuilder(tokenizer, params, "r", (5,))
    ids = tokenizer("[THINK]hm[/THINK]<|im_start|>Yes", add_special_tokens=False)["input_ids"]
    delta = builder.feed(TokenDelta("r", 0, tuple(ids), finish_reason=FinishReason.LENGTH))
    assert delta is not None
    assert (delta.reasoning, delta.text) == ("hm", "Yes")


def written_by(constraint: ThoughtConstraint, wanted: str) -> str:
    """What comes out if the model would like to write `wanted`, token by token, and takes the first that is allowed."""
    wish, out = ids_of(wanted), []
    while not constraint.finished and len(out) < 200:
        mask = constraint.allowed()
        allowed = [i for i in range(VOCAB_SIZE) if mask is None or int(mask[i // 32]) >> (i % 32) & 1]
        assert allowed
        choice = wish[len(out)] if len(out) < len(wish) and wish[len(out)] in allowed else allowed[0]
        if mask is None and len(out) >= len(wish):
            break
        constraint.accept(choice)
        out.append(choice)
    assert constraint.error is None
    return str(TOKENIZER.decode(out, skip_special_tokens=False))


COMPILER = GrammarCompiler(build_tokenizer(), VOCAB_SIZE, {2})
YES = {"type": "choice", "choice": ["yes"]}


def constraint(opened: bool, budget: int | None, form: dict[str, object] | None = YES) -> ThoughtConstraint:
    then = None if form is None else COMPILER.compile(form)
    return ThoughtConstraint(TOKENIZER, VOCAB_SIZE, THOUGHTS["think"], opened, budget, then, calls=False)


@pytest.mark.parametrize("opened", [True, False])
def test_a_grammar_begins_after_the_thought(opened: bool) -> None:
    thought = ("" if opened else "<think>") + "no, no</think>"
    assert written_by(constraint(opened, None), thought + "yes").removesuffix("<|im_end|>") == thought + "yes"


def test_an_answer_may_come_at_once_where_no_thought_is_open() -> None:
    assert written_by(constraint(False, None), "yes").removesuffix("<|im_end|>") == "yes"
    assert written_by(constraint(False, None), "no").removesuffix("<|im_end|>") != "no"


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_ends_the_thought_by_its_closing_tag(budget: int) -> None:
    wanted = "one two three four five six seven"
    out = written_by(constraint(True, budget), wanted).removesuffix("<|im_end|>")
    thought = TOKENIZER.decode(ids_of(wanted)[:budget])
    assert out == f"{thought}</think>yes"
    assert written_by(constraint(True, budget, None), wanted).startswith(f"{thought}</think>")


def test_a_copy_goes_its_own_way() -> None:
    one = constraint(True, None)
    other = one.fork()
    for token in ids_of("abc</think>"):
        one.accept(token)
    assert one.allowed() is not None
    assert other.allowed() is None
    assert json.dumps(written_by(other, "x</think>yes").removesuffix("<|im_end|>")) == '"x</think>yes"'
