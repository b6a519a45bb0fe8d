"""From token deltas to what a client sees: text, stop strings, usage, log-probabilities. One builder per choice."""

from __future__ import annotations

from typing import Any

from ..params import SamplingParams
from ..request import Delta, FinishReason, Logprob, RequestOutput, TokenDelta, Usage
from .detokenizer import IncrementalDetokenizer, special_ids
from .stops import StopMatcher


class OutputBuilder:
    """Feeds on `TokenDelta`s and gives cumulative `RequestOutput`s.

    The text of the token that ended the request (an end id or one of `stop_token_ids`) is not shown, unless
    `include_stop_str_in_output` is set or it is a special token and `skip_special_tokens` is off; its id is part of
    `token_ids` always. Text held back as a possible stop string is shown when the request ends otherwise.

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
            None if tokenizer is None else IncrementalDetokenizer(tokenizer, params.skip_special_tokens, before)
        )
        self._special = frozenset() if tokenizer is None else special_ids(tokenizer)
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._params = params
        self._request_id = request_id
        self._index = index
        self._prompt_token_ids = prompt_token_ids
        self._cached_tokens = 0
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[Logprob] | None = None if params.logprobs is None else []
        self._prompt_logprobs: tuple[Logprob | None, ...] | None = None
        self.finished = False
        self.stopped_by_text = False  # a stop string matched: the engine does not know yet that the request ended

    def feed(self, delta: TokenDelta) -> RequestOutput | None:
        """The output after this delta; None once the request has finished, and for a delta that says nothing."""
        if self.finished or not (delta.token_ids or delta.finish_reason or delta.prompt_logprobs):
            return None
        self._cached_tokens = delta.cached_tokens or self._cached_tokens
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        shown: list[str] = []
        taken = 0
        stop: str | None = None
        for token_id in delta.token_ids:
            taken += 1
            last = taken == len(delta.token_ids)
            stop = self._push(token_id, hidden=last and delta.ends_with_stop_token, shown=shown)
            if stop is not None:
                break
        new_ids = delta.token_ids[:taken]
        new_logprobs = None if delta.logprobs is None else delta.logprobs[:taken]
        if self._logprobs is not None and new_logprobs:
            self._logprobs += new_logprobs
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        if stop is None and reason is not None:
            stop = self._flush(shown)
        if stop is not None:
            self.stopped_by_text = delta.finish_reason is None
            reason, stop_reason = FinishReason.STOP, stop
        self.finished = reason is not None
        fresh = "".join(shown)
        self._text.append(fresh)
        return self._output(fresh, new_ids, new_logprobs, reason, stop_reason, delta)

    def _push(self, token_id: int, hidden: bool, shown: list[str]) -> str | None:
        """Adds one token; returns the stop string that it completed."""
        self._token_ids.append(token_id)
        if self._detokenizer is None:
            return None
        if hidden and not self._params.include_stop_str_in_output:
            hidden = self._params.skip_special_tokens or token_id not in self._special
            if hidden:
                return None
        return self._match(self._detokenizer.push((token_id,)), shown)

    def _flush(self, shown: list[str]) -> str | None:
        """The end: shows what the detokenizer and the stop matcher still hold."""
        if self._detokenizer is None:
            return None
        stop = self._match(self._detokenizer.finish(), shown)
        if stop is None:
            shown.append(self._stops.finish())
        return stop

    def _match(self, text: str, shown: list[str]) -> str | None:
        text, stop = self._stops.push(text, armed=len(self._token_ids) > self._params.min_tokens)
        shown.append(text)
        return stop

    def _output(
        self,
        fresh: str,
        new_ids: tuple[int, ...],
        new_logprobs: tuple[Logprob, ...] | None,
        reason: FinishReason | None,
        stop_reason: int | str | None,
        delta: TokenDelta,
    ) -> RequestOutput:
        if len(self._text) > 64:  # joining a long list each time would cost the square of its length
            self._text = ["".join(self._text)]
        return RequestOutput(
            self._request_id,
            "".join(self._text),
            tuple(self._token_ids),
            None if reason is None else reason.value,
            stop_reason,
            Usage(len(self._prompt_token_ids), len(self._token_ids), self._cached_tokens),
            None if self._logprobs is None else tuple(self._logprobs),
            self._prompt_logprobs,
            delta.timings,
            Delta(fresh, new_ids, new_logprobs),
            self._index,
            delta.error,
            prompt_token_ids=self._prompt_token_ids,
        )
