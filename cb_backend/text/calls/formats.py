"""The call formats, and which of them a chat template shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from .base import CallFormat
from .json_objects import JsonObjects
from .markup import Markup
from .named_json import NamedJson
from .pythonic import Pythonic

HERMES = JsonObjects(
    name="hermes",
    openings=("<tool_call>",),
    specials=("<tool_call>", "</tool_call>"),
    begin="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    closing="</tool_call>",
)
LLAMA = JsonObjects(
    name="llama3_json",
    openings=("<|python_tag|>",),
    specials=("<|python_tag|>",),
    bare=re.compile(r"\{"),
    separator="; ",
    key="parameters",
)
MISTRAL = JsonObjects(
    name="mistral",
    openings=("[TOOL_CALLS]",),
    specials=("[TOOL_CALLS]",),
    bare=re.compile(r"\[\s*\{"),
    idents="nine",
    begin="[TOOL_CALLS][",
    separator=", ",
    end="]",
    listed=True,
)
GRANITE = JsonObjects(
    name="granite",
    openings=("<|tool_call|>",),
    specials=("<|tool_call|>",),
    begin="<|tool_call|>[",
    separator=", ",
    end="]",
    listed=True,
)
PHI4 = JsonObjects(
    name="phi4",
    openings=("<|tool_call|>", "functools"),
    specials=("<|tool_call|>", "<|/tool_call|>"),
    begin="<|tool_call|>[",
    separator=", ",
    end="]<|/tool_call|>",
    closing="<|/tool_call|>",
    listed=True,
)
MISTRAL_ARGS = NamedJson(
    name="mistral_args",
    openings=("[TOOL_CALLS]",),
    specials=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    idents="nine",
    separator="[ARGS]",
    header=re.compile(r"(?P<name>[^\[]*)(\[CALL_ID\](?P<ident>.*))?"),
)
KIMI_K2 = NamedJson(
    name="kimi_k2",
    openings=("<|tool_calls_section_begin|>",),
    specials=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    close="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    header=re.compile(r"(?P<ident>(functions\.)?(?P<name>[^:]*)(:\d+)?)"),
    template="functions.{name}:{index}",
)
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
DEEPSEEK_V3 = NamedJson(
    name="deepseek_v3",
    openings=_DEEPSEEK[:1],
    specials=_DEEPSEEK,
    call="<｜tool▁call▁begin｜>",
    separator="\n```json\n",
    close="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
    header=re.compile(r"(function<｜tool▁sep｜>)?(?P<name>.*)"),
    template="function<｜tool▁sep｜>{name}",
)
DEEPSEEK_V31 = NamedJson(
    name="deepseek_v3_1",
    openings=_DEEPSEEK[:1],
    specials=_DEEPSEEK,
    call="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    close="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
)
HARMONY = NamedJson(
    name="harmony",
    openings=(
        "<|channel|>commentary to=functions.",
        "<|channel|>analysis to=functions.",
        "<|start|>assistant<|channel|>commentary to=functions.",
        "<|start|>assistant<|channel|>analysis to=functions.",
        "<|start|>assistant to=functions.",
    ),
    specials=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>"),
    separator="<|message|>",
    close="<|call|>",
    header=re.compile(r"(?P<name>[^\s<]*)[^{]*", re.DOTALL),
    template="{name} <|constrain|>json",
)
QWEN3_CODER = Markup(
    name="qwen3_coder",
    openings=("<tool_call>", "<function="),
    specials=("<tool_call>", "</tool_call>"),
    call="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    call_end="</function>",
    end="</tool_call>",
    line=True,
)
GLM = Markup(
    name="glm",
    openings=("<tool_call>",),
    specials=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    key="<arg_key>",
    key_end="</arg_key> ",
    value_end="</arg_value>",
    call_end="</tool_call>",
)
MINIMAX_M2 = Markup(
    name="minimax_m2",
    openings=("<minimax:tool_call>",),
    specials=("<minimax:tool_call>", "</minimax:tool_call>"),
    call='<invoke name="',
    name_end='">',
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    call_end="</invoke>",
    end="</minimax:tool_call>",
    repeated=False,
)
PYTHONIC = Pythonic(name="pythonic", bare=re.compile(r"\["))
LLAMA4 = Pythonic(
    name="llama4",
    openings=("<|python_start|>",),
    specials=("<|python_start|>", "<|python_end|>"),
    bare=re.compile(r"[\[{]"),
    end="<|python_end|>",
    objects=True,
)

FORMATS: Mapping[str, CallFormat] = {
    one.name: one
    for one in (
        HERMES,
        LLAMA,
        MISTRAL,
        MISTRAL_ARGS,
        GRANITE,
        PHI4,
        QWEN3_CODER,
        GLM,
        MINIMAX_M2,
        KIMI_K2,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        HARMONY,
        PYTHONIC,
        LLAMA4,
    )
}

# What a template that shows tools has in it; the first row that fits. A marker that several formats share stands below
# the ones that only one of them has.
_SHOWN: tuple[tuple[Callable[[str], bool], CallFormat], ...] = (
    (lambda t: "<|channel|>" in t and "<|message|>" in t, HARMONY),
    (lambda t: "<|tool_calls_section_begin|>" in t, KIMI_K2),
    (lambda t: _DEEPSEEK[0] in t and "```json" in t, DEEPSEEK_V3),
    (lambda t: _DEEPSEEK[0] in t, DEEPSEEK_V31),
    (lambda t: "<minimax:tool_call>" in t or ("minimax:" in t and "<invoke name=" in t), MINIMAX_M2),
    (lambda t: "<arg_key>" in t, GLM),
    (lambda t: "<function=" in t and "<parameter=" in t, QWEN3_CODER),
    (lambda t: "[TOOL_CALLS]" in t and "[ARGS]" in t, MISTRAL_ARGS),
    (lambda t: "[TOOL_CALLS]" in t, MISTRAL),
    (lambda t: "<|/tool_call|>" in t, PHI4),
    (lambda t: "<|tool_call|>" in t, GRANITE),
    (lambda t: "<tool_call>" in t, HERMES),
    (lambda t: "<|python_start|>" in t, LLAMA4),
    (lambda t: "<|python_tag|>" in t or '"parameters": dictionary' in t, LLAMA),
    (lambda t: "func_name1(" in t or "[func_name" in t, PYTHONIC),
)


def shown_format(template: str) -> CallFormat | None:
    """The format that a chat template shows; None: none that is read here."""
    return next((style for shows, style in _SHOWN if shows(template)), None)


def call_format(template: str, name: str | None = None) -> CallFormat:
    """The format of a model with this chat template: `name` if the operator says it, else the one that is shown.

    A template that shows none gets tools and their format as a system message in the words of Hermes (text/tools.py).
    """
    return FORMATS[name] if name is not None else shown_format(template) or HERMES


def unread(template: str) -> bool:
    """Whether the template shows tools to the model, but in no form that is read here."""
    return "tools" in template and shown_format(template) is None
