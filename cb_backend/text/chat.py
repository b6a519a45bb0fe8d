"""Chat messages to token ids, through the tokenizer's own template in transformers' sandboxed renderer and no other.

Every fault of the messages becomes a `RequestError` that names the message. Content may be a string or a list of text
parts; null is allowed for an assistant message that calls tools.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..errors import RequestError, first_line, shown
from ..params import check_text, check_texts
from .calls.formats import call_format, unread

logger = logging.getLogger("cb_backend")

Path = tuple[str | int, ...]  # of a field: ("messages", 0, "content")

ROLES = ("system", "developer", "user", "assistant", "tool")

# Characters. More would only be tokenized to learn that no context holds it. A template that loops without end is not
# interrupted: it is the operator's own, unless the operator trusts those of requests.
MAX_RENDERED = 4_000_000

# Parameters of transformers' `apply_chat_template`: through them a request could bring a template or other output.
RESERVED_VARIABLES = frozenset(
    {
        "self",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
    }
    | {"continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs"}
)


class ChatTemplate:
    """The chat format of one tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
        allow_request_template: whether a request may bring a template of its own.
        max_characters: most characters of a rendered conversation.
        tool_call_format: how the model writes calls; None: as its template shows.
    """

    def __init__(
        self,
        tokenizer: Any,
        allow_request_template: bool = False,
        tool_call_format: str | None = None,
        max_characters: int = MAX_RENDERED,
    ) -> None:
        self._tokenizer = tokenizer
        self._allow_request_template = allow_request_template
        self._max_characters = min(max_characters, MAX_RENDERED)
        self._tool_call_format = tool_call_format
        if tool_call_format is None and unread(self.source):
            logger.warning(
                "the chat template shows tools in a form that is not read here: calls are looked for as in %s; "
                "set tool_call_format",
                self.tool_call_format(),
            )

    @property
    def available(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def source(self) -> str:
        """The template itself, or all of them: for looking at what it knows."""
        return str(self._tokenizer.chat_template or "")

    def tool_call_format(self, template: str | None = None) -> str:
        """The name of the format in which the model writes calls; `template`: one that the request brought."""
        return call_format(template or self.source, self._tool_call_format).name

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the conversation. The template writes the special tokens: none is added to them.

        Raises:
            RequestError: the messages or options are wrong, or the template refuses them.
        """
        text = self.render_text(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=template,
            template_kwargs=template_kwargs,
        )
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model will read it; see `render`."""
        if template is not None and not self._allow_request_template:
            raise RequestError("templates in requests are not allowed by this server", path=("chat_template",))
        if template is None and not self.available:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or put a chat_template.jinja beside the model",
                param="messages",
                code="no_chat_template",
            )
        conversation = check_messages(messages)
        self._name_developers(conversation, template)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "'continue_final_message' and 'add_generation_prompt' exclude each other",
                param="continue_final_message",
            )
        if continue_final_message and conversation[-1]["role"] != "assistant":
            raise RequestError(
                "'continue_final_message' needs an assistant message at the end", param="continue_final_message"
            )
        variables = _known_variables(template or self.source, template_kwargs or {})
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation,
                tools=list(tools) if tools else None,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # whatever a template raises, it concerns this request alone
            raise RequestError(
                f"the model's chat template refuses them: {first_line(error)}", path=("messages",)
            ) from None
        if len(text) > self._max_characters:
            raise RequestError(
                f"they render to {len(text)} characters, more than {self._max_characters}",
                path=("messages",),
                code="context_length_exceeded",
            )
        check_text(text, "messages")
        return text

    def _name_developers(self, conversation: list[dict[str, Any]], template: str | None) -> None:
        """ "developer" is OpenAI's newer word for "system": it stays where the template knows it."""
        if "developer" in str(template or self._tokenizer.chat_template):
            return
        for message in conversation:
            if message["role"] == "developer":
                message["role"] = "system"


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with their content as plain strings.

    Raises:
        RequestError: names the first message at fault.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("must be a list with at least one message", path=("messages",))
    return [_check_message(message, ("messages", i)) for i, message in enumerate(messages)]


def _check_message(message: Any, path: Path) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError("must be an object with a role and a content", path=path)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"must be one of {', '.join(ROLES)} (got {shown(role)})", path=(*path, "role"))
    message = {**_given(message), "content": message.get("content")}
    _check_string(message.get("name"), (*path, "name"))
    check_texts({key: value for key, value in message.items() if key != "content"}, *path)
    content = _text_of(message.get("content"), (*path, "content"))
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise RequestError("only an assistant message with tool_calls may be without content", path=(*path, "content"))
    kept = dict(message)
    if "tool_calls" in kept:
        kept["tool_calls"] = _tool_calls(kept["tool_calls"], (*path, "tool_calls"))
    return {**kept, "content": content or ""}


def _tool_calls(calls: Any, path: Path) -> list[dict[str, Any]]:
    """The calls with arguments as objects: clients send them as JSON text, which templates would quote again."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"must be a list of calls (got {shown(calls)})", path=path)
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError("must be an object with a name", path=(*path, i, "function"))
        _check_string(call.get("id"), (*path, i, "id"))
        if call.get("type") not in (None, "function"):
            raise RequestError('must be "function"', path=(*path, i, "type"))
        read.append({**_given(call), "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return read


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Null and an empty list are as good as absent. Templates ask whether a field is there, not what it holds: shown an
    empty `tool_calls`, many render no content."""
    return {key: value for key, value in fields.items() if value is not None and value != []}


def _check_string(value: Any, path: Path) -> None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"must be a string (got {shown(value)})", path=path)


def _arguments(value: Any) -> Any:
    """What a model wrote may be no JSON, and its client must still be able to send it back: then it stays text.

    Nothing, or null as text, is an empty object.
    """
    if not isinstance(value, str):
        return {} if value is None else value
    if value.strip() in ("", "null"):
        return {}
    try:
        read = json.loads(value)
    except ValueError:
        return value
    return read if isinstance(read, dict) else value


def _text_of(content: Any, path: Path) -> str | None:
    if content is None:
        return None
    if isinstance(content, str):
        check_text(content, *path)
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"must be a string or a list of text parts (got {shown(content)})", path=path)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise RequestError(f"only text parts are supported (got type {shown(kind)})", path=(*path, i))
        if not isinstance(part.get("text"), str):
            raise RequestError("must be a string", path=(*path, i, "text"))
        check_text(part["text"], *path, i, "text")
        texts.append(part["text"])
    return "".join(texts)


def _known_variables(template: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `given` that the template names. The others would reach transformers' own parameters, and do nothing.

    Raises:
        RequestError: one is a parameter of transformers.
    """
    if reserved := sorted(RESERVED_VARIABLES.intersection(given)):
        raise RequestError(f"'{reserved[0]}' cannot be set here", path=("chat_template_kwargs",))
    words = _words_of(template)
    return {name: value for name, value in given.items() if name in words}


@lru_cache(maxsize=4)
def _words_of(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", template))
