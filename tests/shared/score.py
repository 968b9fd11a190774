"""Shared by the tests of score."""

from __future__ import annotations

import json
import random
from pathlib import Path

VOCAB = 211


TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
{%- if loop.index0 and message.role == loop.previtem.role -%}{{ raise_exception('turns must alternate') }}{%- endif -%}
{%- if message.role == 'user' %} w3 {% else %} w4 {% endif -%}
{%- if message.content != 'strange' or loop.last %}{{ message.content }}{% endif %} <eos> w6
{%- endfor -%}
{%- if add_generation_prompt %} w4{% endif -%}"""
"""w3 and w4 open the turns of user and assistant, <eos> ends one, and w6 is what a template adds after that."""


USER, ANSWER = {"role": "user", "content": "w20 w21"}, {"role": "assistant", "content": "w30 w31 w32"}


STRANGE = {"role": "assistant", "content": "strange"}


def samples(count: int) -> list[dict]:
    draw = random.Random(count)
    ids = lambda least, most: [draw.randrange(VOCAB) for _ in range(draw.randint(least, most))]  # noqa: E731
    made = [{"prompt": ids(1, 9), "response": ids(1, 25), "reward": 0.5} for _ in range(count)]
    made[count // 3] = {"prompt": "w5 w6 w7", "response": "w8 w9"}
    made[count // 2] = {"prompt": ids(2, 3), "response": []}
    return made


def write(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
