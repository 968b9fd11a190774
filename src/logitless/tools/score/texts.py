"""Token ids of texts and of chat messages, by the tokenizer of the model directory.

    messages  ->  chat template  ->  ids of the whole conversation
    the assistant's message i    =   what comes after the template of messages[:i] with its generation prompt,
                                     up to the end of the template of messages[:i+1], or to its end-of-sequence token

The tokenizer is loaded for the first text.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from logitless.errors import LogitlessError, first_line

Turns = Literal["all", "last"]


class Conversation(NamedTuple):
    """Ids up to the first token that is scored, ids from there on, and which of these are scored."""

    prompt: list[int]
    response: list[int]
    scored: list[bool]


@dataclass(frozen=True)
class Texts:
    """The tokenizer of a model directory. With ``special_tokens``, a text that opens the sequence gets the tokens that
    open one; ``turns`` says which messages of the assistant are scored."""

    folder: Path
    special_tokens: bool = True
    turns: Turns = "all"

    def encode(self, text: str, opens: bool) -> list[int]:
        """Ids of a text; ``opens`` says that it opens the sequence."""
        _check_text(text)
        return self._tokenizer(text, add_special_tokens=opens and self.special_tokens)["input_ids"]

    def opening(self, messages: Any) -> list[int]:
        """Ids of messages that the assistant answers: up to and with the generation prompt."""
        return self._render(_checked(messages), True)

    def conversation(self, messages: Any) -> Conversation:
        """Ids of messages, with the tokens of the assistant's marked."""
        messages = _checked(messages)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or answers[0] == 0:
            wrong = "no message is the assistant's" if not answers else "the assistant's message comes first"
            raise LogitlessError(f"{wrong}, so there is nothing to score, or nothing to predict it from")
        answers = answers if self.turns == "all" else answers[-1:]
        whole = self._render(messages[: answers[-1] + 1], False)
        scored = [False] * len(whole)
        for i in answers:
            before = self._render(messages[:i], True)
            after = whole if i == answers[-1] else self._render(messages[: i + 1], False)
            if whole[: len(before)] != before or whole[: len(after)] != after:
                raise LogitlessError(
                    f"the chat template renders message {i} of the assistant in another way than the messages before "
                    f"it alone, so its tokens are not known. Give token ids, or score the last turn with --turns last"
                )
            stop = self._end(after, len(before))
            scored[len(before) : stop] = [True] * (stop - len(before))
        first, last = scored.index(True), len(scored) - scored[::-1].index(True)
        return Conversation(whole[:first], whole[first:last], scored[first:last])

    def _end(self, ids: list[int], start: int) -> int:
        """The place after the last end-of-sequence token: a line break that a template adds there was not sampled."""
        end = self._tokenizer.eos_token_id
        places = [i for i in range(start, len(ids)) if ids[i] == end]
        return places[-1] + 1 if places else len(ids)

    def _render(self, messages: list[dict[str, Any]], answered: bool) -> list[int]:
        if importlib.util.find_spec("jinja2") is None:
            raise NoTokenizer("score: chat messages need jinja2. Install it, or logitless with its extra [score].")
        from jinja2 import TemplateError

        # The tokenizer is loaded outside of the try: that it is missing is no refusal of a template.
        tokenizer = self._tokenizer
        if getattr(tokenizer, "chat_template", "") is None:
            raise NoTokenizer(
                f"score: the input has chat messages, but the tokenizer in {self.folder} has no chat template. Put one "
                f"there (chat_template.jinja), or give token ids."
            )
        try:
            options = {"add_generation_prompt": answered, "tokenize": True, "return_dict": True}
            rendered = tokenizer.apply_chat_template(messages, **options)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise LogitlessError(f"the chat template refuses it: {first_line(error)}") from None
        return list(rendered["input_ids"])

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise self._missing(first_line(error)) from error
        names = list(tokenizer.vocab_files_names.values())
        # Without its files a tokenizer may still load, with an empty vocabulary: every text would be empty.
        if names and not any((self.folder / name).is_file() for name in names):
            raise self._missing(f"there is none of {', '.join(names)}.")
        return tokenizer

    def _missing(self, reason: str) -> NoTokenizer:
        return NoTokenizer(
            f"score: the input has texts, but no tokenizer could be loaded from {self.folder}: {reason} Put its files "
            f"there, or give token ids."
        )


class NoTokenizer(LogitlessError):
    """The error for a missing tokenizer, or a part of it. No record is skipped for it: no record is at fault."""


def are_messages(value: Any) -> bool:
    """Whether a field looks like chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _checked(messages: Any) -> list[dict[str, Any]]:
    if not are_messages(messages) or not all(isinstance(message.get("role"), str) for message in messages):
        raise LogitlessError("chat messages must be a list of objects with 'role' and 'content'")
    for text in (x for message in messages for x in message.values() if isinstance(x, str)):
        _check_text(text)
    # A column of Parquet has every field in every row.
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _check_text(text: str) -> None:
    """Raise for half of a surrogate pair, which JSON can spell and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LogitlessError(
            f"character {error.start} is half of a surrogate pair, \\u{ord(text[error.start]):04x}, which is no text: "
            f"was it cut in the middle of a character?"
        ) from None
