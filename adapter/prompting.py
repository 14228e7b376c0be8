"""A prompt's text → the token ids that the checkpoint's chat template makes of it, and back.

What a user writes is only ever text: `<sound>` or `<|im_end|>` in a prompt is tokenised as the
characters it consists of.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapter.errors import SettingsError, UnprocessableError
from adapter.reasoning import TAGS, Reasoning, is_opened_by

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from adapter.checkpoint import Checkpoint

SENTINEL = "THE-PROMPT-STANDS-HERE"
PROBE = " Describe this music. "


@dataclass(frozen=True, slots=True)
class Frame:
    """What the chat template puts around a prompt.

    `prefix` ends with `tail`, the plain text behind its last added token; `suffix` starts with
    `head`, the plain text before its first. They are tokenised together with the prompt, since a
    merge may cross the border; the rest has the ids `prefix_ids` and `suffix_ids` for all prompts.
    """

    prefix: str
    suffix: str
    tail: str
    head: str
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]


class Prompter:
    """The checkpoint's tokenizer and chat template; every method may be called from any thread."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises SettingsError for a chat template that cannot be followed."""
        from transformers import AutoProcessor

        self._checkpoint = checkpoint
        self._processor: Any = AutoProcessor.from_pretrained(checkpoint.path)  # type: ignore[no-untyped-call]
        if self._processor.chat_template is None:
            raise self._template_error("its processor has none")
        # Own copies: transformers sets padding and the like on its tokenizer at each call.
        self._tokenizer, self._plain_tokenizer = _copy_tokenizer(self._processor.tokenizer)
        self._frames = {with_audio: self._frame(with_audio) for with_audio in (False, True)}
        self._check_frames()

    def encode(self, text: str, *, with_audio: bool) -> tuple[int, ...]:
        """The ids of a conversation of one turn, up to where the answer starts; with audio, the
        audio's placeholder stands in it once.

        The ids are those of the processor's `apply_chat_template`, unless the text spells an added
        token. Raises UnprocessableError for a text on which the template changes its frame.
        """
        frame = self._frames[with_audio]
        rendered = self._render(text, with_audio)
        end = len(rendered) - len(frame.suffix)
        fits = rendered.startswith(frame.prefix) and rendered.endswith(frame.suffix)
        if not fits or end < len(frame.prefix):
            raise UnprocessableError(
                "the checkpoint's chat template cannot hold this prompt; change its wording",
                field="prompt",
            )
        run = frame.tail + rendered[len(frame.prefix) : end] + frame.head
        run_ids = self._plain_tokenizer.encode(run, add_special_tokens=False).ids
        return (*frame.prefix_ids, *run_ids, *frame.suffix_ids)

    def widen(self, prompt_token_ids: Sequence[int], num_audio_tokens: int) -> list[int]:
        """The prompt with one placeholder for each embedding of its audio, and the boundary tokens
        around them where the checkpoint has them."""
        return self._checkpoint.widen(tuple(prompt_token_ids), num_audio_tokens)

    @property
    def opens_reasoning(self) -> bool:
        """Whether the chat template itself begins each answer with `<think>`."""
        return all(is_opened_by(frame.suffix) for frame in self._frames.values())

    @property
    def reasoning(self) -> Reasoning:
        """Whether an answer begins inside of reasoning, may begin with it, or has none.

        The released think checkpoints are told by their names alone.
        """
        if self.opens_reasoning:
            return "opened"
        has_tags = self._tokenizer.token_to_id(TAGS[0]) is not None
        return "optional" if has_tags or "think" in self._checkpoint.name.lower() else "none"

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of an answer that was held to a grammar: what spells a special token in it is
        text, but for the token that ended it."""
        ended = bool(token_ids) and token_ids[-1] in self._checkpoint.eos_token_ids
        kept = list(token_ids[:-1] if ended else token_ids)
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer: special tokens skipped but for the tags of reasoning, spaces as
        they are; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _render(self, text: str, with_audio: bool) -> str:
        content = [{"type": "text", "text": text}]
        if with_audio:
            content.insert(0, {"type": "audio", "path": "song"})
        conversation = [{"role": "user", "content": content}]
        return str(self._processor.apply_chat_template(conversation, add_generation_prompt=True))

    def _frame(self, with_audio: bool) -> Frame:
        prefix, sentinel, suffix = self._render(SENTINEL, with_audio).partition(SENTINEL)
        if not sentinel or SENTINEL in suffix:
            raise self._template_error("it does not repeat the prompt's text once")
        added = set(self._tokenizer.get_added_tokens_decoder())
        before = self._tokenizer.encode(prefix, add_special_tokens=False)
        after = self._tokenizer.encode(suffix, add_special_tokens=False)
        # Offsets are characters of the string that was encoded.
        spans = [span for i, span in zip(before.ids, before.offsets, strict=True) if i in added]
        cut = spans[-1][1] if spans else 0
        spans = [span for i, span in zip(after.ids, after.offsets, strict=True) if i in added]
        start = spans[0][0] if spans else len(suffix)
        return Frame(
            prefix=prefix,
            suffix=suffix,
            tail=prefix[cut:],
            head=suffix[:start],
            prefix_ids=self._encode_template(prefix[:cut]),
            suffix_ids=self._encode_template(suffix[start:]),
        )

    def _encode_template(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _check_frames(self) -> None:
        """Better no start than prompts that the model was not trained on."""
        for with_audio in (False, True):
            token_ids = self.encode(PROBE, with_audio=with_audio)
            expected = self._processor.tokenizer(self._render(PROBE, with_audio))["input_ids"]
            if list(token_ids) != list(expected):
                raise self._template_error("its tokens depend on the prompt's text")
            if token_ids.count(self._checkpoint.audio_token_id) != int(with_audio):
                raise self._template_error("it does not have one placeholder for the audio")

    def _template_error(self, reason: str) -> SettingsError:
        return SettingsError(
            f"ADAPTER_MODEL={self._checkpoint.name}: its chat template cannot be followed: {reason}"
        )


def _copy_tokenizer(tokenizer: Any) -> tuple[Tokenizer, Tokenizer]:
    """A copy of the backend that keeps the tags of reasoning in an answer, and one that knows no
    added token."""
    from tokenizers import Tokenizer

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content |= {"truncation": None, "padding": None, "post_processor": None}
    for token in content["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in TAGS
    plain = content | {"added_tokens": []}
    return Tokenizer.from_str(json.dumps(content)), Tokenizer.from_str(json.dumps(plain))
