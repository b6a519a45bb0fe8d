"""What every call format is: how its calls are found and read, and the grammar that forces them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from .cursor import Cursor

# More calls than this in one forced answer are a model that does not find the end.
MAX_FORCED_CALLS = 8

Literal = Callable[[str], str]  # a text as a Lark expression, its special tokens as tokens


class Calls(Protocol):
    """Where a format tells what it has read."""

    cursor: Cursor

    def known(self, name: object) -> bool:
        """Whether there is a function of that name."""

    def start(self, name: str, ident: str | None = None) -> None:
        """A call begins: from here on what is read is no text any more."""

    def arguments(self, piece: str) -> None:
        """More of the JSON text of the arguments of the call that began last."""

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The JSON schema of the arguments of a known function."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be forced. `schema`: of its arguments, an object's, ready for the grammar library."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallFormat(ABC):
    """Attributes:
    name: what operators and clients call it.
    openings: each begins calls wherever it stands in an answer.
    bare: what an answer that is a call without an opening begins with: the opening was a special token, or there is
        none.
    specials: markers that may be special tokens of the tokenizer and have to be shown to be read.
    idents: how ids of calls are made: `call`, or `nine` letters and digits (Mistral's template takes no other).
    """

    name: str
    openings: tuple[str, ...] = ()
    bare: re.Pattern[str] | None = None
    specials: tuple[str, ...] = ()
    idents: str = "call"

    NO_CALL: ClassVar[str] = "no call"

    @abstractmethod
    def read(self, calls: Calls, opening: str) -> Generator[None, None, bool]:
        """Reads the calls after `opening` ("" if the answer began with one). False: the rest since the last call, or
        all of it, is text."""

    @abstractmethod
    def grammar(self, functions: Sequence[Function], parallel: bool, literal: Literal) -> list[str]:
        """The rules, in Lark's notation from `start` on, that let nothing pass but calls of the functions."""


@dataclass(slots=True)
class Rules:
    """Lark rules that are being written."""

    lines: list[str] = field(default_factory=list)

    def add(self, name: str, expression: str) -> str:
        self.lines.append(f"{name}: {expression}")
        return name


def calls_rule(begin: str, call: str, separator: str, end: str, parallel: bool) -> str:
    """One call, or several if they may be parallel; the arguments are Lark expressions, "" is nothing."""
    more = f"({separator} {call}){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""
    return " ".join(part for part in (begin, call, more, end) if part)
