"""Messages through a template: what is rendered, and what is refused with the message's name."""

from __future__ import annotations

import pytest

from cb_backend.errors import RequestError
from cb_backend.text.chat import ChatTemplate
from tests.tiny_models import build_tokenizer

USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def chat(tokenizer):
    return ChatTemplate(tokenizer)


def test_ids_are_those_of_the_rendered_text_without_further_special_tokens(chat, tokenizer):
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render_text([USER]) == text
    assert chat.render([USER]) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_text_parts_are_joined_and_developer_is_the_system(chat):
    parts = {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]}
    assert chat.render_text([parts, USER]).startswith("<|im_start|>system\nBe kind.<|im_end|>\n")


def test_without_generation_prompt_and_continuing_an_answer(chat):
    assert chat.render_text([USER], add_generation_prompt=False).endswith("Hi<|im_end|>\n")
    started = [USER, {"role": "assistant", "content": "Hel"}]
    assert chat.render_text(started, add_generation_prompt=False, continue_final_message=True).endswith(
        "assistant\nHel"
    )


@pytest.mark.parametrize(
    "messages, param, words",
    [
        ([], "messages", "at least one"),
        ("hello", "messages", "at least one"),
        (["hello"], "messages.0", "object"),
        ([{"content": "x"}], "messages.0.role", "None"),
        ([USER, {"role": "king", "content": "x"}], "messages.1.role", "'king'"),
        ([{"role": "user"}], "messages.0.content", "content"),
        ([{"role": "user", "content": 5}], "messages.0.content", "string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0", "image_url"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content.0", "text parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text", "string"),
    ],
)
def test_bad_messages_are_named(chat, messages, param, words):
    with pytest.raises(RequestError, match=words) as raised:
        chat.render(messages)
    assert raised.value.param == param


def test_an_assistant_that_calls_tools_may_be_without_content(chat):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert "assistant" in chat.render_text([USER, {"role": "assistant", "content": None, "tool_calls": [call]}])


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}])
def test_continuing_needs_an_assistant_message_and_no_generation_prompt(chat, options):
    with pytest.raises(RequestError) as raised:
        chat.render([USER], continue_final_message=True, **options)
    assert raised.value.param == "continue_final_message"


def test_what_a_template_refuses_is_the_clients_fault():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}"
    with pytest.raises(RequestError, match="System role not supported"):
        ChatTemplate(tokenizer).render([{"role": "system", "content": "x"}])


def test_a_template_cannot_reach_the_process():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RequestError, match="refuses"):
        ChatTemplate(tokenizer).render([USER])


def test_no_template_and_templates_in_requests():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate(tokenizer).render([USER])
    with pytest.raises(RequestError, match="not allowed"):
        ChatTemplate(tokenizer).render([USER], template="x")
    assert ChatTemplate(tokenizer, allow_request_template=True).render_text([USER], template="yes") == "yes"


def test_an_endless_rendering_is_refused():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for i in range(99999) %}" + "x" * 50 + "{% endfor %}"
    with pytest.raises(RequestError, match="characters"):
        ChatTemplate(tokenizer).render([USER])


def test_arguments_of_tool_calls_reach_the_template_as_objects():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    call = {"id": "1", "type": "function", "function": {"name": "f"}}

    def rendered(**given):
        calls = [{**call, "function": {**call["function"], **given}}]
        return ChatTemplate(tokenizer).render_text([USER, {"role": "assistant", "tool_calls": calls}])

    assert rendered(arguments='{"city": "Köln"}') == '{"city": "Köln"}'
    assert rendered(arguments={"city": "Köln"}) == '{"city": "Köln"}'
    assert rendered(arguments='{"city": ') == '"{\\"city\\": "'  # a model's slip comes back as its client has it
    assert rendered() == "{}"


@pytest.mark.parametrize(
    "calls, param",
    [
        ("f", "messages.0.tool_calls"),
        ([{"id": "1"}], "messages.0.tool_calls.0.function"),
        ([{"function": {"name": 5}}], "messages.0.tool_calls.0.function"),
        ([{"id": 5, "function": {"name": "f"}}], "messages.0.tool_calls.0.id"),
        ([{"type": {}, "function": {"name": "f"}}], "messages.0.tool_calls.0.type"),
    ],
)
def test_a_faulty_tool_call_is_named(chat, calls, param):
    with pytest.raises(RequestError) as raised:
        chat.render([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert raised.value.param == param


def test_tool_messages_pass_with_their_call_and_name():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages[0].tool_call_id }} {{ messages[0].name }}: {{ messages[0].content }}"
    message = {"role": "tool", "tool_call_id": "c7", "name": "weather", "content": [{"type": "text", "text": "rain"}]}
    assert ChatTemplate(tokenizer).render_text([message]) == "c7 weather: rain"


def test_a_template_that_knows_developers_keeps_them():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages[0].role }}{# developer #}"
    assert ChatTemplate(tokenizer).render_text([{"role": "developer", "content": "x"}]) == "developer"


def test_case_067_068_every_text_part_is_kept_and_one_part_is_a_string(chat):
    def parts(*texts):
        return [{"type": "text", "text": text} for text in texts]

    for role in ("system", "user"):
        assert "AB<|im_end|>" in chat.render_text([{"role": role, "content": parts("A", "B")}, USER])
        plain = chat.render([{"role": role, "content": "A"}, USER])
        assert chat.render([{"role": role, "content": parts("A")}, USER]) == plain


@pytest.mark.parametrize("text", ["emoji \ud83d", "x \ude00 y"])
def test_case_149_half_a_surrogate_pair_is_refused(chat, text):
    with pytest.raises(RequestError, match="surrogate") as raised:
        chat.render([USER, {"role": "user", "content": text}])
    assert raised.value.param == "messages.1.content"
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ tools[0].function.description }}"
    with pytest.raises(RequestError, match="surrogate"):
        ChatTemplate(tokenizer).render(
            [USER], tools=[{"type": "function", "function": {"name": "f", "description": text}}]
        )


def test_template_options_cannot_take_the_place_of_fields(chat):
    for field in ("conversation", "chat_template", "tokenize", "tools", "add_generation_prompt", "messages"):
        with pytest.raises(RequestError):
            chat.render([USER], template_kwargs={field: "x"})


ASKING = (
    "{% for m in messages %}{% if m.tool_calls is defined %}[calls]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("nothing", [None, []])
@pytest.mark.parametrize("field", ["tool_calls", "refusal", "annotations", "audio", "name", "reasoning_content"])
def test_what_is_empty_is_absent(tokenizer, field, nothing):
    """vllm#30648, #13978: an answer sent back with an empty list of calls lost its text."""
    asking = ASKING.replace("tool_calls", field)
    chat = ChatTemplate(tokenizer, allow_request_template=True)
    answer = {"role": "assistant", "content": "The answer is 42.", field: nothing}
    assert chat.render_text([USER, answer], template=asking) == "HiThe answer is 42."


def test_what_is_empty_in_a_call_is_absent_and_no_arguments_are_an_object(tokenizer):
    chat = ChatTemplate(tokenizer, allow_request_template=True)
    shown = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.index is defined }}{{ c.function.arguments }}"
    shown += "{% endfor %}{% endfor %}"
    for arguments in (None, "", "null", " null ", {}, "{}"):
        call = {"id": "1", "index": None, "function": {"name": "f", "arguments": arguments}}
        rendered = chat.render_text([USER, {"role": "assistant", "tool_calls": [call]}], template=shown)
        assert rendered == "False{}"


def test_a_template_in_an_unread_form_is_warned_of(tokenizer, caplog):
    class Other:
        chat_template = "{{ tools }}<call>"

    ChatTemplate(Other())
    assert "set tool_call_format" in caplog.text
    caplog.clear()
    assert ChatTemplate(Other(), tool_call_format="glm").tool_call_format() == "glm"
    assert ChatTemplate(tokenizer).tool_call_format() == "hermes"
    assert caplog.text == ""
