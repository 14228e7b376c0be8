"""The checkpoints of the family, each as a tiny one of its architecture and limits."""

from dataclasses import dataclass

from adapter.random_model import ModelShape


@dataclass(frozen=True)
class Member:
    """One kind of checkpoint, and what must be read of it."""

    repositories: tuple[str, ...]  # that are of this kind
    shape: ModelShape
    max_clip_seconds: int
    context_tokens: int
    num_boundary_tokens: int


FAMILY = {
    "music-flamingo": Member(
        repositories=("nvidia/music-flamingo-2601-hf",),
        shape=ModelShape(),
        max_clip_seconds=1200,
        context_tokens=32_768,
        num_boundary_tokens=2,
    ),
    "music-flamingo-think": Member(
        repositories=("nvidia/music-flamingo-think-2601-hf",),
        shape=ModelShape(think=True),
        max_clip_seconds=1200,
        context_tokens=32_768,
        num_boundary_tokens=2,
    ),
    "audio-flamingo-next": Member(
        repositories=("nvidia/audio-flamingo-next-hf", "nvidia/audio-flamingo-next-captioner-hf"),
        shape=ModelShape(max_audio_seconds=1800, context_tokens=131_072, rope_theta=15.3e6),
        max_clip_seconds=1800,
        context_tokens=131_072,
        num_boundary_tokens=2,
    ),
    "audio-flamingo-next-think": Member(
        repositories=("nvidia/audio-flamingo-next-think-hf",),
        shape=ModelShape(
            max_audio_seconds=1800, context_tokens=131_072, rope_theta=15.3e6, think=True
        ),
        max_clip_seconds=1800,
        context_tokens=131_072,
        num_boundary_tokens=2,
    ),
    "audio-flamingo-3": Member(
        repositories=("nvidia/music-flamingo-hf", "nvidia/audio-flamingo-3-hf"),
        shape=ModelShape(
            architecture="AudioFlamingo3ForConditionalGeneration", max_audio_seconds=600
        ),
        max_clip_seconds=600,
        context_tokens=32_768,
        num_boundary_tokens=0,
    ),
}
