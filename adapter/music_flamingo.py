"""The Music Flamingo family as vLLM models: named to vLLM by `adapter.plugin`, never imported else.

A song is a Whisper-style mel spectrogram in windows of 30 s. Each window goes through the audio
tower by itself (750 embeddings), is rotated by its time in the song (RoTE, Music Flamingo only) and
projected to the language model's width. vLLM's AudioFlamingo3 has the tower, the projector and the
language model; this file adds the rest.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import MusicFlamingoConfig, MusicFlamingoProcessor
from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict
from vllm.model_executor.models import audioflamingo3
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import PromptReplacement, PromptUpdate, PromptUpdateDetails
from vllm.platforms import current_platform

WINDOWS_PER_SLICE = 8  # of 30 s: the most that the audio tower holds in memory at a time
FRAMES_PER_EMBEDDING = 4  # a stride of 2 in the tower's second convolution, 2 in its pooling
AUDIO_PLACEHOLDER = "<sound>"


class AudioFlamingo3ProcessingInfo(audioflamingo3.AudioFlamingo3ProcessingInfo):
    """What vLLM asks about the checkpoint before any audio is there."""

    num_boundary_tokens = 0

    def get_max_audio_tokens(self, seq_len: int) -> int:
        """The most embeddings of one audio: what the checkpoint hears or the context holds."""
        processor = self.get_hf_processor()
        heard_samples = int(processor.max_audio_len * self.get_feature_extractor().sampling_rate)
        return min(
            heard_samples // self.get_samples_per_token(), seq_len - self.num_boundary_tokens
        )

    def get_samples_per_token(self) -> int:
        return FRAMES_PER_EMBEDDING * int(self.get_feature_extractor().hop_length)

    def get_mm_max_tokens_per_item(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],  # noqa: ARG002
    ) -> Mapping[str, int]:
        """Spare vLLM making features of a silent song of full length only to count them."""
        return {"audio": self.get_max_audio_tokens(seq_len)}


class MusicFlamingoProcessingInfo(AudioFlamingo3ProcessingInfo):
    num_boundary_tokens = 2

    def get_hf_config(self) -> MusicFlamingoConfig:
        return self.ctx.get_hf_config(MusicFlamingoConfig)

    def get_hf_processor(self, **kwargs: object) -> MusicFlamingoProcessor:
        return self.ctx.get_hf_processor(MusicFlamingoProcessor, **kwargs)


class DummyInputsBuilder(audioflamingo3.AudioFlamingo3DummyInputsBuilder):
    """The longest song that a request can bring: what vLLM measures its memory with."""

    info: AudioFlamingo3ProcessingInfo

    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: MultiModalDummyOptions,
    ) -> MultiModalDataDict:
        length = self.info.get_max_audio_tokens(seq_len) * self.info.get_samples_per_token()
        audios = self._get_dummy_audios(
            length=length,
            num_audios=mm_counts.get("audio", 0),
            overrides=mm_options.get("audio"),
        )
        return {"audio": audios}


class MusicFlamingoMultiModalProcessor(audioflamingo3.AudioFlamingo3MultiModalProcessor):
    """Widens the one placeholder of a prompt as the checkpoint's own processor does."""

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        """Put the boundary tokens around the audio tokens; only the latter become embeddings."""
        processor = self.info.get_hf_processor(**hf_processor_mm_kwargs)
        (audio_update,) = super()._get_prompt_updates(
            mm_items, hf_processor_mm_kwargs, out_mm_kwargs
        )

        def bounded(item_idx: int) -> PromptUpdateDetails:
            audio_tokens = audio_update.resolve(item_idx).content.full
            return PromptUpdateDetails.select_token_id(
                [processor.audio_bos_token_id, *audio_tokens, processor.audio_eos_token_id],
                embed_token_id=processor.audio_token_id,
            )

        return [PromptReplacement("audio", [processor.audio_token_id], bounded)]


class RotaryTimeEmbedding(nn.Module):
    """RoTE: turns the first channels of each embedding by its window's and its frame's time.

    The formula is that of the released code (transformers' `MusicFlamingoRotaryEmbedding`), in the
    same order of operations, so that float32 results are equal bit by bit. Half of the turned
    channels follow the window's index in its song, half the frame's index in its window; both
    angles are multiplied by the time since the song's start. The buffers are float32 whatever the
    model's dtype, and computed, never loaded.
    """

    inv_freq: torch.Tensor  # (dim / 2,)
    frame_angles: torch.Tensor  # (max_position_embeddings, dim)

    def __init__(self, config: MusicFlamingoConfig) -> None:
        super().__init__()
        rope: dict[str, Any] = config.rope_parameters  # type: ignore[assignment]
        if rope["rope_type"] != "default":
            raise ValueError(
                f"rope_parameters.rope_type of the checkpoint is {rope['rope_type']!r}: "
                "only 'default' is known for Music Flamingo's time embedding"
            )
        self.max_positions = config.max_position_embeddings
        self.seconds_per_embedding = config.audio_frame_step * FRAMES_PER_EMBEDDING
        dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        # On the CPU, since another device's pow() may differ in the last bit.
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
        inv_freq = 1.0 / (rope["rope_theta"] ** exponents)
        positions = torch.arange(int(self.max_positions), dtype=torch.float32, device="cpu")
        angles = (positions / self.max_positions * (2 * math.pi)).unsqueeze(-1) * inv_freq
        device = torch.get_default_device()
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)
        self.register_buffer(
            "frame_angles", angles.repeat_interleave(2, dim=-1).to(device), persistent=False
        )

    def forward(self, hidden_states: torch.Tensor, first_window: int) -> torch.Tensor:
        """Turn `hidden_states` (windows, frames, channels) of one song, from `first_window` on."""
        num_windows, num_frames, _ = hidden_states.shape
        cos, sin = self.cos_sin(first_window, num_windows, num_frames)
        return rotate(hidden_states, cos, sin)

    def cos_sin(
        self, first_window: int, num_windows: int, num_frames: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the angles, float32 of shape (windows, frames, 2 * dim)."""
        device = self.inv_freq.device
        windows = torch.arange(first_window, first_window + num_windows, device=device)
        frames = torch.arange(num_frames, dtype=torch.float32, device=device)
        # As in the reference, a time is rounded to float32 before the frame's offset is added.
        window_starts = (windows * num_frames).float() * self.seconds_per_embedding
        seconds = window_starts.unsqueeze(-1) + frames * self.seconds_per_embedding
        window_angles = (windows.float() / self.max_positions).unsqueeze(-1) * self.inv_freq
        window_angles = window_angles.repeat_interleave(2, dim=-1).unsqueeze(1)
        angles = torch.cat(
            (
                window_angles.expand(-1, num_frames, -1),
                self.frame_angles[:num_frames].expand(num_windows, -1, -1),
            ),
            dim=-1,
        )
        angles = angles * (-seconds * 2 * math.pi).unsqueeze(-1)
        return angles.cos(), angles.sin()


def rotation_dtype(device: torch.device) -> torch.dtype:
    """float64 as in the reference; float32 on Apple's GPUs, which have no float64.

    The angles are float32 either way, so that the difference is one of rounding: at most 3e-7 of
    the embedding's largest value.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def rotate(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Turn neighbouring pairs of the first `cos.shape[-1]` channels; the other channels stay."""
    dtype = dtype or rotation_dtype(hidden_states.device)
    num_turned = cos.shape[-1]
    turned, rest = hidden_states[..., :num_turned].to(dtype), hidden_states[..., num_turned:]
    even, odd = turned[..., 0::2], turned[..., 1::2]
    quarter_turned = torch.stack((-odd, even), dim=-1).flatten(-2)
    turned = turned * cos.to(dtype) + quarter_turned * sin.to(dtype)
    return torch.cat((turned.to(hidden_states.dtype), rest), dim=-1)


@MULTIMODAL_REGISTRY.register_processor(
    audioflamingo3.AudioFlamingo3MultiModalProcessor,
    info=AudioFlamingo3ProcessingInfo,
    dummy_inputs=DummyInputsBuilder,
)
class AudioFlamingo3ForConditionalGeneration(audioflamingo3.AudioFlamingo3ForConditionalGeneration):
    """vLLM's AudioFlamingo3, for every naming of the weights and for long audio."""

    # Uploads name the parts as vLLM does; transformers' modules are `model.*` and `lm_head`, and
    # its save_pretrained writes `language_model.model.model.*`.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_regex={
            re.compile(r"^(model\.)?(audio_tower\.)?pos_emb\."): None,
            re.compile(r"^model\.(?=audio_tower\b|multi_modal_projector\b|language_model\b)"): "",
            re.compile(r"^lm_head\b"): "language_model.lm_head",
            re.compile(
                r"^language_model\.(model\.)*(?=(embed_tokens|layers|norm)\b)"
            ): "language_model.model.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if current_platform.is_cpu():
            from adapter.cpu_seeds import keep_seeds

            keep_seeds()

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:  # noqa: ARG003
        """The audio's placeholder, for chat templates that take a message's content as a string."""
        if modality != "audio":
            raise ValueError(f"the model hears audio; it takes no {modality}")
        return AUDIO_PLACEHOLDER

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    def _process_audio_input(
        self, audio_input: audioflamingo3.AudioFlamingo3Inputs
    ) -> tuple[torch.Tensor, ...]:
        if audio_input.type == "audio_embeds":
            return tuple(audio_input.audio_embeds)
        features, mask, chunk_counts = self._normalize_audio_feature_inputs(audio_input)
        songs = torch.split(features, chunk_counts), torch.split(mask, chunk_counts)
        return tuple(self._embed_song(*song) for song in zip(*songs, strict=True))

    def _embed_song(self, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Embeddings (audio tokens, hidden size) of one song's windows (windows, mel bins, frames).

        A song by itself, in slices: the attention scores of a long song's windows are never all in
        memory, and a song's embeddings do not depend on what is encoded beside it. A last window of
        one or two mel frames has no embedding; it is masked out here like any padding.
        """
        embeddings = []
        for first_window in range(0, len(features), WINDOWS_PER_SLICE):
            windows = slice(first_window, first_window + WINDOWS_PER_SLICE)
            hidden_states = self._encode_audio_features(features[windows], mask[windows])
            hidden_states = self._add_time(hidden_states, first_window)
            projected = self.multi_modal_projector(hidden_states)
            valid, _ = audioflamingo3._flatten_valid_audio_embeddings(projected, mask[windows])
            embeddings.append(valid)
        return torch.cat(embeddings)

    def _add_time(self, hidden_states: torch.Tensor, first_window: int) -> torch.Tensor:  # noqa: ARG002
        return hidden_states


@MULTIMODAL_REGISTRY.register_processor(
    MusicFlamingoMultiModalProcessor,
    info=MusicFlamingoProcessingInfo,
    dummy_inputs=DummyInputsBuilder,
)
class MusicFlamingoForConditionalGeneration(AudioFlamingo3ForConditionalGeneration):
    """AudioFlamingo3 with RoTE between the tower and the projector."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.pos_emb = RotaryTimeEmbedding(self.config)  # type: ignore[arg-type]

    def _add_time(self, hidden_states: torch.Tensor, first_window: int) -> torch.Tensor:
        return self.pos_emb(hidden_states, first_window)  # type: ignore[no-any-return]
