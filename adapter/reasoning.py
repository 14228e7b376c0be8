"""What a think checkpoint wrote before its answer, apart from the answer.

The think checkpoints of the family write `<think>…</think>` and then what they have to say. Nothing
in their files tells them from the others, neither configuration nor vocabulary, so the beginning of
an answer decides: thinking comes first or not at all.
"""

from __future__ import annotations

from typing import Literal

Reasoning = Literal["none", "optional", "opened"]

OPEN = "<think>"
CLOSE = "</think>"
TAGS = (OPEN, CLOSE)


def split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    """The reasoning, None where there is none, and the response: `text` without it and its tags.

    `opened` is true where the chat template has written `<think>` already (`is_opened_by`).
    Reasoning that is not closed, because the answer was cut or ended in the middle of it, is all
    there is: the response is empty then. Tags anywhere else are text. White space around the tags
    is dropped.
    """
    begun = text.lstrip()
    if begun.startswith(OPEN):
        begun = begun.removeprefix(OPEN)
    elif not opened:
        return None, text
    reasoning, _, response = begun.partition(CLOSE)
    return reasoning.strip(), response.lstrip()


def is_opened_by(template_end: str) -> bool:
    """Whether what a chat template puts behind a prompt leaves `<think>` open.

    A template that closes it at once (`<think></think>`) asks for an answer without reasoning.
    """
    return template_end.rfind(OPEN) > template_end.rfind(CLOSE)
