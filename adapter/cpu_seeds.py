"""Seeds on vLLM's CPU backend, which 0.32 answers with the end of the engine.

A prompt that is computed in parts, because it is long or comes with others, is sampled after each
part, and all but the last token are thrown away. vLLM then turns the generator of a seeded prompt
back by CUDA's offset; a generator of the CPU has none, raises, and the engine dies.
"""

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def keep_seeds() -> None:
    """Let tokens that are thrown away be drawn without their prompt's generator, from here on.

    It is as if they had not been drawn, so that a seed means the same however a prompt is cut.
    """
    if CPUModelRunner.sample_tokens is not _sample_tokens:
        CPUModelRunner.sample_tokens = _sample_tokens  # type: ignore[method-assign,assignment]


def _sample_tokens(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    generators = self.input_batch.generators
    thrown_away = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
    spared = {int(row): generators.pop(int(row)) for row in thrown_away if int(row) in generators}
    try:
        return super(CPUModelRunner, self).sample_tokens(*args, **kwargs)
    finally:
        generators.update(spared)
