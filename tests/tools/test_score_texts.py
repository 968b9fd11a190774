"""Texts and chat messages of ``score``: what is missing ends the job, and nothing is looked for elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import transformers
from shared.score import ANSWER, USER, write

from logitless.tools.score.files import Source
from logitless.tools.score.texts import Conversation, NoTokenizer, Texts

CHAT = {"messages": [USER, ANSWER]}
KINDS = {
    "messages": CHAT,
    "a chat prompt": {"prompt": [USER], "response": [5]},
    "a text": {"prompt": "w5", "response": [5]},
}


def read(tmp_path: Path, records: list[dict], texts: Texts) -> list:
    source = Source(write(tmp_path / "in.jsonl", records))
    ((_, _, found),) = source.parts(8, lambda part: True, texts, skip=True)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_tokenizer_no_record_is_skipped(tmp_path: Path, kind: str):
    """The folder has no file of a tokenizer."""
    with pytest.raises(NoTokenizer, match=r"no tokenizer could be loaded from .*Put its files there, or give token"):
        read(tmp_path, [KINDS[kind]], Texts(tmp_path))


@pytest.mark.parametrize("kind", ["messages", "a chat prompt"])
def test_without_jinja2_no_record_is_skipped(tmp_path: Path, monkeypatch, kind: str):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "jinja2" else find(name))
    with pytest.raises(NoTokenizer, match=r"chat messages need jinja2\. Install it, or logitless with its extra"):
        read(tmp_path, [KINDS[kind]], Texts(tmp_path))


class Plain:
    """A tokenizer without a chat template, or with one that refuses everything."""

    eos_token_id = 2

    def __init__(self, template: str | None) -> None:
        self.chat_template, self.vocab_files_names = template, {}

    def apply_chat_template(self, messages: list, **options: object) -> dict:
        raise ValueError("turns must alternate")


@pytest.fixture
def loaded(monkeypatch) -> list:
    """How tokenizers were loaded: folder and options; the tokenizer itself is put in front by the test."""
    calls: list = []

    def load(folder: Path, **options: object) -> Plain:
        calls.append((folder, options))
        return calls[0]

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    return calls


def test_without_a_chat_template_no_record_is_skipped(tmp_path: Path, loaded: list):
    loaded.append(Plain(None))
    with pytest.raises(NoTokenizer, match=r"has chat messages, but the tokenizer in .* has no chat template\. Put one"):
        read(tmp_path, [CHAT], Texts(tmp_path))


def test_a_record_that_the_template_refuses_is_skipped(tmp_path: Path, loaded: list):
    loaded.append(Plain("a template"))
    (reject,) = read(tmp_path, [CHAT], Texts(tmp_path))
    assert (reject.index, reject.place) == (0, "in.jsonl, line 1")
    assert "'messages': the chat template refuses it: turns must alternate" in reject.reason


def test_a_tokenizer_is_looked_for_in_its_folder_alone(tmp_path: Path, loaded: list):
    loaded.append(Plain("a template"))
    assert Texts(tmp_path)._tokenizer is loaded[0]
    assert loaded[1:] == [(tmp_path, {"local_files_only": True, "trust_remote_code": False})]


class Known(Texts):
    """Ids of a conversation without a tokenizer."""

    def conversation(self, messages: object) -> Conversation:
        return Conversation([1, 2], [3, 4, 5], [True, False, True])


def test_a_record_of_messages_has_its_number_and_place(tmp_path: Path):
    found = read(tmp_path, [CHAT, CHAT], Known(tmp_path))
    assert [(record.index, record.place) for record in found] == [(0, "in.jsonl, line 1"), (1, "in.jsonl, line 2")]
    assert (found[1].prompt, found[1].response, found[1].tokens) == ([1, 2], [3, 4, 5], [3, 5])
