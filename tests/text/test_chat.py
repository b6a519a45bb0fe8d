"""Messages through a template: what is rendered, and what is refused with the message's name."""

from __future__ import annotations

import pytest

from cb_backend.request import RequestError
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
