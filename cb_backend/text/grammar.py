"""Structured output: a response format becomes a constraint on the next token, by the grammar library llguidance.

    {"type": "json_object"}                                   any JSON object
    {"type": "json_schema", "json_schema": {"schema": {...}}}  JSON that fits the schema
    {"type": "regex", "regex": "..."}                          text that matches from beginning to end
    {"type": "choice", "choice": ["a", "b"]}                   one of these texts
    {"type": "grammar", "grammar": "start: ..."}               a Lark grammar

Compiling happens on the caller's thread, never on the engine's; results are cached. A constraint's state belongs to its
request, so neither preemption nor a neighbour touches it; a fork copies it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import RequestError, first_line
from ..params import check_texts
from .calls.base import Function
from .calls.formats import FORMATS
from .detokenizer import special_texts
from .json_style import style
from .response_format import checked
from .schema import larger_than, without_annotations
from .tools import TOOL_CALLS

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_COMPILE_SECONDS = 10.0
_CACHE_SIZE = 128
MAX_REPORT = 600  # characters

_ONE_OF = (
    "oneOf is supported where no value can fit two of its branches, which could not be shown of this one; "
    "use anyOf, or give the branches a required property with different constants"
)


class GrammarConstraint:
    """The `Constraint` of one request: which tokens may come next (see request.py)."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> npt.NDArray[np.int32]:
        """int32 words, one bit per token id, lowest bit first."""
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    @property
    def finished(self) -> bool:
        """Nothing may follow: the grammar is complete, or it failed."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        return first_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def fork(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy())


class GrammarCompiler:
    """Response formats to constraints for one tokenizer. May be used from several threads.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: rows of the logits; ids past the tokenizer's own are never allowed.
        eos_token_ids: ids that may end the text where the grammar is complete.
        max_compile_seconds: how long a caller waits, for a free thread too, until its grammar is refused as too slow.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        max_compile_seconds: float = MAX_COMPILE_SECONDS,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._patience = max_compile_seconds
        self._wrapped: Any = None
        self._cache: OrderedDict[str, GrammarConstraint] = OrderedDict()
        self._lock = threading.Lock()
        # Compiling is bounded in work by the library and in our patience here; two may be slow at a time.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="cb-grammar")

    def compile(self, response_format: Mapping[str, Any]) -> GrammarConstraint | None:
        """A fresh constraint, or None for `{"type": "text"}`.

        Raises:
            RequestError: an unknown type, a faulty or unsupported schema, one that no text fits, or one too large, too
                deep or too slow to compile.
        """
        _check_grammar_library()
        if larger_than(response_format, MAX_GRAMMAR_BYTES):
            raise _refuse(f"larger than {MAX_GRAMMAR_BYTES} bytes")
        check_texts(response_format, "response_format")
        forced = response_format.get("type") == TOOL_CALLS
        wanted = response_format if forced else checked(response_format)
        if wanted["type"] == "text":
            return None
        try:
            key = json.dumps(wanted)
        except RecursionError:
            raise _refuse("it is nested too deeply") from None
        except (TypeError, ValueError):
            raise _refuse("the schema holds a value that is no JSON") from None
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None:
                self._cache.move_to_end(key)
                return cached.fork()
        building = self._pool.submit(self._build, wanted)
        try:
            made = building.result(self._patience)
        except FutureTimeout:
            building.cancel()  # if it waits for a thread: its caller has left
            raise _refuse(f"compiling it took more than {self._patience:g} s; simplify it") from None
        with self._lock:
            self._cache[key] = made
            while len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return made.fork()

    def _build(self, wanted: Mapping[str, Any]) -> GrammarConstraint:
        from llguidance import LLMatcher

        try:
            grammar = self._grammar_of(wanted)
        except RecursionError:
            raise _refuse("it is nested too deeply") from None
        matcher = LLMatcher(self._ll_tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            report = _report(matcher.get_error())
            raise _refuse(_ONE_OF if report.startswith("oneOf ") else report)
        # Some faults show only where the first token is chosen, as in a schema that refers to itself for ever.
        begun = GrammarConstraint(matcher.deep_copy())
        begun.allowed()
        if begun.error is not None:
            raise _refuse(f"no text fits it ({begun.error})")
        return GrammarConstraint(matcher)

    def _ll_tokenizer(self) -> Any:
        """The tokenizer as the library wants it: made at the first use, about a second for a large vocabulary."""
        with self._lock:
            if self._wrapped is None:
                from llguidance.hf import from_tokenizer

                self._wrapped = from_tokenizer(self.tokenizer, n_vocab=self.vocab_size, eos_token=self._eos or None)
            return self._wrapped

    def _grammar_of(self, wanted: Mapping[str, Any]) -> str:
        from llguidance import LLMatcher

        kind = wanted["type"]
        if kind == TOOL_CALLS:
            return self._calls(wanted)
        if kind == "json_object":
            return _json_grammar({"type": "object"})
        if kind == "json_schema":
            return _json_grammar(wanted["json_schema"]["schema"])
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(_text(wanted, "regex")))
        if kind == "choice":
            return str(LLMatcher.grammar_from_lark("start: " + " | ".join(_choices(wanted))))
        return str(LLMatcher.grammar_from_lark(_text(wanted, "grammar")))

    def _calls(self, wanted: Mapping[str, Any]) -> str:
        """The grammar of forced calls, as `ToolSet.grammar` asks for it."""
        from llguidance import LLMatcher

        functions = [Function(one["name"], styled(one["schema"])) for one in wanted["functions"]]
        rules = FORMATS[wanted["format"]].grammar(functions, wanted["parallel"], self._literal)
        return str(LLMatcher.grammar_from_lark("\n".join(rules) + "\n"))

    def _literal(self, text: str) -> str:
        return literal(text, special_texts(self.tokenizer))


def literal(text: str, specials: Mapping[str, int]) -> str:
    """A text as a Lark expression: what are special tokens of the tokenizer can only be said as tokens."""
    parts, rest = [], text
    while rest:
        at, found = min(((rest.find(special), special) for special in specials if special in rest), default=(-1, ""))
        plain = rest if at < 0 else rest[:at]
        parts += [json.dumps(plain)] if plain else []
        parts += [f"<[{specials[found]}]>"] if found else []
        rest = rest[len(plain) + len(found) :]
    return " ".join(parts)


def _check_grammar_library() -> None:
    if find_spec("llguidance") is None:
        raise RequestError(
            "this server has no grammar library; install cb-backend[grammar]",
            path=("response_format",),
            code="unsupported",
        )


def _json_grammar(schema: Any) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(without_annotations(schema), overrides=style(schema)))


def styled(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with the library's options inside, as a rule of a larger grammar has it."""
    return {**without_annotations(schema), "x-guidance": style(schema)}


def _text(response_format: Mapping[str, Any], field: str) -> str:
    value = response_format.get(field)
    if not isinstance(value, str) or not value:
        raise _refuse(f"{field} must be a non-empty string", field)
    return value


def _choices(response_format: Mapping[str, Any]) -> list[str]:
    values = response_format.get("choice")
    if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
        raise _refuse("choice must be a list of non-empty strings", "choice")
    return [json.dumps(value) for value in values]


def _report(error: str) -> str:
    """The library's whole message on one line, without the marks under its quotations and the state that follows."""
    lines = [line.strip() for line in error.strip().partition("<state>")[0].splitlines()]
    told = " ".join(line for line in lines if line.strip(" ^-|"))
    return told if len(told) <= MAX_REPORT else told[: MAX_REPORT - 3] + "..."


def _refuse(reason: str, *field: str) -> RequestError:
    return RequestError(reason, path=("response_format", *field))
