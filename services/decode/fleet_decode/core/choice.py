"""One choice of a request: ids in, the events' contents out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet_contracts.decode import DecodeParams
from fleet_decode.core.continuation import Route, StreamDivergedError
from fleet_decode.core.detokenize import Detokenizer
from fleet_decode.core.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step adds to a choice.

    Attributes:
        num_skipped: leading ids of the step that the client has already.
        token_ids: ids to send, those whose text is held back included.
        text: characters to send.
        finish_reason, stop_reason: set when the choice is over; later ids of the step were dropped.
    """

    num_skipped: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    stop_reason: str | None = None


class Choice:
    """Text, stop strings and counters of one choice.

    Args:
        detokenizer: fresh state for this choice.
        params: the client's parameters.
        route: where it starts from.
        end_ids: token ids that end it.
    """

    def __init__(
        self, detokenizer: Detokenizer, params: DecodeParams, route: Route, end_ids: frozenset[int] = frozenset()
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(params.stop)
        self._min_tokens = params.min_tokens
        self._end_ids = end_ids
        self._verify = route.verify
        self._replay = route.replay
        self._num_sent = route.num_done
        self._num_chars_sent = route.num_text_chars
        self._num_chars = 0
        self._backlog = ""
        self.num_tokens = 0
        self.num_left = route.max_tokens
        self._release(params.echo_prompt_text)

    def rebuild(self) -> Delta | None:
        """Replay the ids the client has.

        Returns:
            A last delta when those ids already end the choice, else None: the engine goes on.
        Raises:
            StreamDivergedError: the client has more text than they make.
        """
        last = self._accept(self._replay, is_stop_token=False)
        if last is None and self._replay:
            if self._replay[-1] in self._end_ids and self.num_tokens > self._min_tokens:
                last = self._finish("stop")
            elif self.num_left < 1:
                last = self._finish("length")
        if last is None and not self._verify and self._num_chars < self._num_chars_sent:
            raise StreamDivergedError("the client has more text than its tokens make")
        return last

    def accept(self, token_ids: Sequence[int], finish_reason: str | None, stop_token_id: int | None = None) -> Delta:
        """Take one engine step.

        Args:
            token_ids: new ids of this sequence.
            finish_reason: `stop` (the last id ended it) or `length`, when this is the engine's last step.
            stop_token_id: the id asked for in `stop_token_ids` that matched.
        Raises:
            StreamDivergedError: other ids than the client has.
        """
        num_before = self.num_tokens
        last = self._accept(token_ids, is_stop_token=finish_reason == "stop")
        num_skipped = max(0, min(self._num_sent, self.num_tokens) - num_before)
        ids = tuple(token_ids[num_skipped : self.num_tokens - num_before])
        if finish_reason is not None and self.num_tokens < len(self._verify):
            raise StreamDivergedError("the repeated stream ended before what the client has")
        if last is None and finish_reason is not None:
            last = self._finish(finish_reason, None if stop_token_id is None else str(stop_token_id))
        if last is None:
            return Delta(num_skipped, ids, self._take())
        return Delta(num_skipped, ids, last.text, last.finish_reason, last.stop_reason)

    def _accept(self, token_ids: Sequence[int], *, is_stop_token: bool) -> Delta | None:
        final = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            index = self.num_tokens
            if index < len(self._verify) and self._verify[index] != token_id:
                raise StreamDivergedError(f"token {index} differs from the one the client has")
            self.num_tokens += 1
            if is_stop_token and position == final:
                # The token that ends a choice is counted and reported, but its text is not part of the answer.
                continue
            text, stop = self._matcher.push(
                self._detokenizer.push(token_id), is_armed=self.num_tokens > self._min_tokens
            )
            self._release(text)
            if stop is not None:
                return Delta(0, (), self._take(), "stop", stop)
        return None

    def _finish(self, reason: str, stop_reason: str | None = None) -> Delta:
        text, stop = self._matcher.push(self._detokenizer.flush(), is_armed=self.num_tokens > self._min_tokens)
        self._release(text)
        if stop is not None:
            return Delta(0, (), self._take(), "stop", stop)
        self._release(self._matcher.flush())
        return Delta(0, (), self._take(), reason, stop_reason)

    def _release(self, text: str) -> None:
        """Queue text for sending, less the characters the client has."""
        num_known = max(0, min(len(text), self._num_chars_sent - self._num_chars))
        self._num_chars += len(text)
        self._backlog += text[num_known:]

    def _take(self) -> str:
        text, self._backlog = self._backlog, ""
        return text
