"""Token ids of a response to what its client gets: text, stop strings, thinking, calls, log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from trainer.protocols.common import ChatCompletion, Delta, FunctionCall
from trainer.serving.model_engine import Update
from trainer.serving.turn_splitter import TurnSplitter


class ResponseReader:
    """Reads one response as it is generated.

    The text depends on the token ids alone, never on how many of them arrive at a time.
    """

    def __init__(
        self,
        index: int,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer,
        splitter: TurnSplitter | None,
        *,
        stop: Sequence[str],
        token_text: Callable[[int], str] | None,
        with_special: bool,
        turn: int,
    ) -> None:
        """index: of the choice. splitter: None for a text without turns. token_text: None: tokens without texts.

        with_special: keep special tokens in the text, since calls may be written with them. turn: number of turns before.
        """
        self.index, self.prompt_ids = index, prompt_ids
        self.completion: ChatCompletion | None = None
        """Set when the response has ended."""
        self._tokenizer, self._splitter, self._stop, self._token_text = tokenizer, splitter, stop, token_text
        self._with_special = with_special
        self._decoder = DecodeStream(skip_special_tokens=not with_special)
        self._last: list[int] = []
        """Tokens with which the text last grew."""
        self._pending: list[int] = []
        """Tokens after it: bytes that are no character yet."""
        self._turn = turn
        self._text = ""
        self._given = 0
        """Characters of the text that were given to the splitter."""
        self._token_ids: list[int] = []
        self._log_probs: list[float] = []
        self._tokens: list[str] = []

    def add(self, update: Update) -> Delta:
        """What is new. Sets ``completion`` if the response ended, by a stop string too."""
        first, found, keeps = len(self._token_ids), None, len(update.token_ids)
        # A stop token is no part of the text.
        shown = update.token_ids[:-1] if update.finish_reason == "stop" else update.token_ids
        if not self._stop:
            self._text += "".join(map(self._decoded, shown))
        else:
            for i, token in enumerate(shown):
                before = len(self._text)
                self._text += self._decoded(token)
                if (found := self._stopped(before)) is not None:
                    self._text, keeps = self._text[: found[0]], i + 1
                    break
        self._token_ids += update.token_ids[:keeps]
        self._log_probs += update.log_probs[:keeps]
        if self._token_text is not None:
            self._tokens += map(self._token_text, update.token_ids[:keeps])
        new = self._token_ids[first:], self._log_probs[first:], self._tokens[first:]
        thinking, text, calls = "", "", tuple[FunctionCall, ...]()
        ends = found is not None or update.finish_reason is not None
        # The end of the text may be the beginning of a stop string.
        until = len(self._text) if ends or not self._stop else len(self._text) - self._open_stop()
        piece, self._given = self._text[self._given : until], max(until, self._given)
        if self._splitter is None:
            text = piece
        else:
            thinking, text = self._splitter.add(piece)
        if ends:
            truncated = found is None and update.finish_reason == "length"
            self.completion = self._complete(truncated=truncated, stop_sequence=None if found is None else found[1])
            if self._splitter is not None:
                more = self._splitter.rest(self.completion.thinking, self.completion.text)
                thinking, text, calls = thinking + more[0], text + more[1], self.completion.calls
        return Delta(self.index, text, thinking, calls, *new)

    def _decoded(self, token: int) -> str:
        """Text that ``token`` completes."""
        try:
            text = self._decoder.step(self._tokenizer, token)
        # ByteFallback decodes a run of bytes as a whole: one that is no UTF-8 changes characters of the run that were given out
        # before, and the stream refuses, with nothing narrower than Exception. It begins again at this token.
        except Exception:
            if not self._pending:
                raise
            hidden = not self._with_special
            text = "".join(self._tokenizer.decode([byte], skip_special_tokens=hidden) for byte in self._pending)
            self._decoder = DecodeStream(self._last, skip_special_tokens=hidden)
            text += self._decoder.step(self._tokenizer, token) or ""
        if text is None:
            self._pending.append(token)
            return ""
        self._last, self._pending = [*self._pending, token], []
        return text

    def _complete(self, *, truncated: bool, stop_sequence: str | None) -> ChatCompletion:
        thinking, text, calls = "", self._text, tuple[FunctionCall, ...]()
        if self._splitter is not None:
            thinking, text, found = self._splitter.end(truncated=truncated, turn=self._turn)
            calls = tuple(FunctionCall(call.id, call.name, call.arguments) for call in found)
        return ChatCompletion(
            text,
            "length" if truncated else "tool_calls" if calls else "stop",
            self.prompt_ids,
            self._token_ids,
            self._log_probs,
            self._tokens,
            thinking,
            calls,
            stop_sequence,
        )

    def _stopped(self, before: int) -> tuple[int, str] | None:
        """Where the first stop string begins, and which. before: characters of the text that had none."""
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        return min(found, default=None)

    def _open_stop(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        longest = max(map(len, self._stop), default=0)
        ends = range(min(len(self._text), longest - 1), 0, -1)
        return next((n for n in ends if any(stop.startswith(self._text[-n:]) for stop in self._stop)), 0)
