"""The reference of every comparison: Hugging Face alone, one prompt at a time, greedy.

Nothing here touches `adapter`: the processor, the chat template and `generate()` are transformers'.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AutoConfig, AutoProcessor, GenerationConfig


@dataclass(frozen=True)
class ReferenceAnswer:
    """One greedy answer, a value per generated token in `logprobs` and `margins`.

    `logprobs` are of the raw logits. A margin is the distance between the two best candidates,
    after the repetition penalty: where it is tiny, rounding may choose either.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    margins: list[float]

    def decided(self, threshold: float = 1e-3) -> int:
        """The number of leading tokens that rounding cannot change."""
        close = (step for step, margin in enumerate(self.margins) if margin < threshold)
        return next(close, len(self.token_ids))


class Reference:
    """A checkpoint under transformers' own `generate()`, on the CPU."""

    def __init__(self, model_dir: str | Path, dtype: str = "float32") -> None:
        architecture = AutoConfig.from_pretrained(model_dir).architectures[0]
        model_class = getattr(transformers, architecture)
        self.processor = AutoProcessor.from_pretrained(model_dir)
        self.model = model_class.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
        # Only the ids that end an answer: the rest of generation_config.json must not colour it.
        eos_token_id = self.model.generation_config.eos_token_id
        self.model.generation_config = GenerationConfig(
            eos_token_id=eos_token_id or self.processor.tokenizer.eos_token_id,
            pad_token_id=self.processor.tokenizer.pad_token_id,
        )

    def inputs(self, samples: npt.NDArray[np.float32] | None, prompt: str) -> dict[str, Any]:
        """What the processor makes of one turn: mono samples at 16 kHz, or None, and a text."""
        content: list[dict[str, Any]] = [{"type": "text", "text": prompt}]
        if samples is not None:
            content.insert(0, {"type": "audio", "audio": samples})
        conversation = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        audio = None if samples is None else [samples]
        return dict(self.processor(text=[text], audio=audio).to(self.model.dtype))

    def plain_inputs(self, samples: npt.NDArray[np.float32] | None, prompt: str) -> dict[str, Any]:
        """The same, also for a text that spells special tokens: the turn's text is tokenised by
        itself, as plain text, and put where the text of a harmless turn stands."""
        tokenizer = self.processor.tokenizer
        added = tokenizer.get_added_vocab()
        if not any(token in prompt for token in added):
            return self.inputs(samples, prompt)
        inputs = self.inputs(samples, "hello")
        ids = inputs["input_ids"][0].tolist()
        end = len(ids) - 1 - ids[::-1].index(added["<|im_end|>"])
        start = max(i for i, token_id in enumerate(ids[:end]) if token_id in added.values()) + 1
        text = prompt if samples is not None else f"user\n{prompt}"
        plain = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        inputs["input_ids"] = torch.tensor([[*ids[:start], *plain, *ids[end:]]])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs

    def answer(
        self,
        samples: npt.NDArray[np.float32] | None,
        prompt: str,
        max_new_tokens: int,
        *,
        repetition_penalty: float = 1.0,
    ) -> ReferenceAnswer:
        inputs = self.inputs(samples, prompt)
        return self.generate(inputs, max_new_tokens, repetition_penalty=repetition_penalty)

    def generate(
        self, inputs: dict[str, Any], max_new_tokens: int, *, repetition_penalty: float = 1.0
    ) -> ReferenceAnswer:
        output = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            repetition_penalty=repetition_penalty,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
        )
        prompt_token_ids = inputs["input_ids"][0].tolist()
        token_ids = output.sequences[0, len(prompt_token_ids) :]
        logprobs = torch.cat(output.logits).log_softmax(-1)
        best = torch.cat(output.scores).topk(2).values
        return ReferenceAnswer(
            prompt_token_ids=prompt_token_ids,
            token_ids=token_ids.tolist(),
            logprobs=logprobs.gather(1, token_ids[:, None])[:, 0].tolist(),
            margins=(best[:, 0] - best[:, 1]).tolist(),
        )

    def first_logits(
        self, samples: npt.NDArray[np.float32] | None, prompt: str
    ) -> npt.NDArray[np.float32]:
        """The raw logits of an answer's first token, of shape (vocab_size,)."""
        with torch.no_grad():
            logits = self.model(**self.inputs(samples, prompt)).logits[0, -1]
        return logits.float().numpy()
