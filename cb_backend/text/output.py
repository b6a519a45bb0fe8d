"""From token deltas to what a client sees: text, stop strings, usage, log-probabilities. One builder per choice.

Deltas stay deltas: the text so far is joined by an `OutputCollector`, for a caller that wants it.
"""

from __future__ import annotations

from typing import Any

from ..client import OutputDelta
from ..params import SamplingParams
from ..request import Delta, FinishReason, Logprob, RequestOutput, RequestTimings, TokenDelta, Usage
from .detokenizer import IncrementalDetokenizer, special_ids, special_texts
from .stops import StopMatcher
from .thoughts import THOUGHTS, ThoughtSplitter


class OutputBuilder:
    """Turns `TokenDelta`s into `OutputDelta`s.

    The text of the token that ended the request (an end id or one of `stop_token_ids`) is not shown, unless
    `include_stop_str_in_output` is set or it is a special token and `skip_special_tokens` is off; its id is part of
    `token_ids` always. Text held back as a possible stop string is shown when the request ends otherwise.
    A stop string that is the text of a special token matches that token, hidden or not.

    Args:
        tokenizer: None leaves the text empty and looks for no stop strings.
        prompt_token_ids: for the usage.
        continues_prompt: the text goes on the prompt's instead of beginning anew.
    """

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        index: int = 0,
        continues_prompt: bool = False,
    ) -> None:
        before = prompt_token_ids if continues_prompt else ()
        self._detokenizer = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(tokenizer, params.skip_special_tokens, before, _shown_ids(tokenizer, params))
        )
        thinking = params.thinking
        self._thoughts = None if thinking is None else ThoughtSplitter(THOUGHTS[thinking.format], thinking.opened)
        self._reasoning: list[str] = []  # of the delta that is being made
        self._num_reasoning = 0
        self._special = frozenset() if tokenizer is None else special_ids(tokenizer)
        self._hidden_stops = {} if tokenizer is None else _hidden_stops(tokenizer, params)
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._params = params
        self._request_id = request_id
        self._index = index
        self._prompt_token_ids = prompt_token_ids
        self._cached_tokens = 0
        self._num_tokens = 0
        self._timings: RequestTimings | None = None
        self.finished = False
        self.stopped_by_text = False  # a stop string matched: the engine does not know yet that the request ended

    def feed(self, delta: TokenDelta) -> OutputDelta | None:
        """What this delta adds; None once the request has finished, and for a delta that says nothing."""
        if self.finished or not (delta.token_ids or delta.finish_reason or delta.prompt_logprobs):
            return None
        self._cached_tokens = delta.cached_tokens or self._cached_tokens
        self._timings = delta.timings or self._timings
        shown: list[str] = []
        taken = 0
        stop: str | None = None
        for token_id in delta.token_ids:
            taken += 1
            last = taken == len(delta.token_ids)
            stop = self._push(token_id, hidden=last and delta.ends_with_stop_token, shown=shown)
            if stop is not None:
                break
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        if stop is None and reason is not None:
            stop = self._flush(shown)
        if stop is not None:
            self.stopped_by_text = delta.finish_reason is None
            reason, stop_reason = FinishReason.STOP, stop
        self.finished = reason is not None
        reasoning = "".join(self._reasoning)
        self._reasoning.clear()
        return OutputDelta(
            self._request_id,
            self._index,
            "".join(shown),
            delta.token_ids[:taken],
            None if self._params.logprobs is None else (delta.logprobs or ())[:taken],
            None if reason is None else reason.value,
            stop_reason,
            Usage(len(self._prompt_token_ids), self._num_tokens, self._cached_tokens, self._num_reasoning),
            delta.prompt_logprobs,
            self._prompt_token_ids,
            self._timings,
            delta.error,
            reasoning,
        )

    def _push(self, token_id: int, hidden: bool, shown: list[str]) -> str | None:
        """Adds one token; returns the stop string that it completed."""
        self._num_tokens += 1
        if self._detokenizer is None:
            return None
        if hidden and not self._params.include_stop_str_in_output:
            hidden = self._params.skip_special_tokens or token_id not in self._special
            if hidden:
                return None
        if token_id in self._hidden_stops and self._armed and not (self._thoughts and self._thoughts.thinking):
            stop = self._flush(shown)
            if stop is None:
                stop = self._hidden_stops[token_id]
                shown.append(stop if self._params.include_stop_str_in_output else "")
            return stop
        text = self._detokenizer.push((token_id,))
        if self._thoughts is None:
            return self._match(text, shown)
        before = self._thoughts.thinking
        stop = self._part(self._thoughts.push(text), shown)
        self._num_reasoning += before or self._thoughts.thinking
        return stop

    @property
    def _armed(self) -> bool:
        """Stop strings end nothing before `min_tokens` tokens are there beside the one that completes them."""
        return self._num_tokens > self._params.min_tokens

    def _part(self, pieces: list[tuple[bool, str]], shown: list[str]) -> str | None:
        """Shows thoughts as they are, and looks for stop strings in the answer."""
        for thought, text in pieces:
            if thought:
                self._reasoning.append(text)
                continue
            stop = self._match(text, shown)
            if stop is not None:
                return stop
        return None

    def _flush(self, shown: list[str]) -> str | None:
        """The end: shows what the detokenizer and the stop matcher still hold."""
        if self._detokenizer is None:
            return None
        text = self._detokenizer.finish()
        if self._thoughts is None:
            stop = self._match(text, shown)
        else:
            stop = self._part(self._thoughts.push(text) + self._thoughts.finish(), shown)
        if stop is None and self._stops is not None:
            shown.append(self._stops.finish())
        return stop

    def _match(self, text: str, shown: list[str]) -> str | None:
        if self._stops is None:
            shown.append(text)
            return None
        text, stop = self._stops.push(text, armed=self._armed)
        shown.append(text)
        return stop


def _shown_ids(tokenizer: Any, params: SamplingParams) -> frozenset[int]:
    """The special tokens that are text for this request."""
    if not params.shown_special_tokens:
        return frozenset()
    known = special_texts(tokenizer)
    return frozenset(known[text] for text in params.shown_special_tokens if text in known)


def _hidden_stops(tokenizer: Any, params: SamplingParams) -> dict[int, str]:
    """The stop strings that are special tokens whose text is hidden, by their ids."""
    if not params.stop or not params.skip_special_tokens:
        return {}
    known = special_texts(tokenizer)
    stops = {known[text]: text for text in params.stop if text in known}
    return {token_id: text for token_id, text in stops.items() if token_id not in _shown_ids(tokenizer, params)}


class OutputCollector:
    """Joins the deltas of several choices to cumulative `RequestOutput`s. Keys are the caller's numbers of choices."""

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}

    def add(self, key: int, delta: OutputDelta) -> None:
        self._choices.setdefault(key, _Choice()).add(delta)

    def output(self, key: int) -> RequestOutput:
        """The choice as it is now. Costs its whole length."""
        return self._choices[key].output()

    def outputs(self) -> dict[int, RequestOutput]:
        """Every choice, by key."""
        return {key: self.output(key) for key in sorted(self._choices)}

    def result(self) -> RequestOutput:
        """The first choice; if there are several, with all of them in `choices`."""
        choices = tuple(self.outputs().values())
        return choices[0] if len(choices) == 1 else choices[0].with_choices(choices)


class _Choice:
    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprob] | None = None
        self._prompt_logprobs: tuple[Logprob | None, ...] | None = None
        self._last: OutputDelta | None = None

    def add(self, delta: OutputDelta) -> None:
        self._last = delta
        self._text.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        self._token_ids += delta.token_ids
        if delta.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += delta.logprobs
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs

    def output(self) -> RequestOutput:
        last = self._last
        assert last is not None  # a choice begins with a delta
        if len(self._text) > 64:  # joining a long list for each of its outputs would cost the square of its length
            self._text = ["".join(self._text)]
        return RequestOutput(
            last.request_id,
            "".join(self._text),
            tuple(self._token_ids),
            last.finish_reason,
            last.stop_reason,
            last.usage,
            None if self._logprobs is None else tuple(self._logprobs),
            self._prompt_logprobs,
            last.timings,
            Delta(last.text, last.token_ids, last.logprobs),
            last.index,
            last.error,
            prompt_token_ids=last.prompt_token_ids,
            reasoning="".join(self._reasoning),
        )
