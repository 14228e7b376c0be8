"""The floor: what a run must take on a device, from the model's configuration alone.

    python -m benchmarks.floor                        a full report on an A100 40 GB, on paper
    python -m benchmarks.floor --help                 other songs, answers, cards and weights

A phase takes as long as its arithmetic at the device's matrix rate or its bytes at the device's
bandwidth, whichever is longer: a roofline. Weights are read once a step, a song's keys and values
once for all prompts about it (or, as paged attention does it, once for each). Norms, biases,
rotations, softmax and sampling are left out, and so is everything on the host.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WINDOW_SECONDS = 30
WINDOW_FRAMES = 3000  # mel frames; the second convolution halves them, pooling halves them again
EMBEDDINGS_A_SECOND = 25
SHARED_TEXT_TOKENS = 16  # of a prompt: the system prompt and the frame before the song
OWN_TEXT_TOKENS = 16  # of a prompt: its question and the frame behind it

# The caps of a full report's sections.
REPORT_TOKENS = (1024, 256, 256, 2048, 256, 512, 1024, 512, 512, 1024, 1024, 512, 1024)
A100_USD_PER_SECOND = 0.000583


@dataclass(frozen=True)
class Device:
    """`bytes_per_second` of the memory, `flops_per_second` of matrix products."""

    name: str
    bytes_per_second: float
    flops_per_second: float


# From the makers' data sheets: dense, bfloat16 with float32 sums (the T4 knows float16 only).
CARDS = {
    "a100-40": Device("A100 40 GB", 1555e9, 312e12),
    "a10": Device("A10 24 GB", 600e9, 125e12),
    "l4": Device("L4 24 GB", 300e9, 121e12),
    "t4": Device("T4 16 GB", 320e9, 65e12),
}


@dataclass(frozen=True)
class Shape:
    """A checkpoint's sizes: of the audio encoder, then of the language model."""

    encoder_layers: int
    encoder_hidden_size: int
    encoder_intermediate_size: int
    num_mel_bins: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int

    @property
    def convolution_weights(self) -> tuple[int, int]:
        """Kernels of 3: from the mel bins, then with a stride of 2."""
        width = self.encoder_hidden_size
        return 3 * self.num_mel_bins * width, 3 * width * width

    @property
    def encoder_layer_weights(self) -> int:
        width = self.encoder_hidden_size
        return 4 * width * width + 2 * width * self.encoder_intermediate_size

    @property
    def projector_weights(self) -> int:
        return self.encoder_hidden_size * self.hidden_size + self.hidden_size**2

    @property
    def encoder_weights(self) -> int:
        """Of everything that a song passes before the language model."""
        layers = self.encoder_layers * self.encoder_layer_weights
        return sum(self.convolution_weights) + layers + self.projector_weights

    @property
    def layer_weights(self) -> int:
        """Of all layers of the language model."""
        attention = 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def output_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def kv_values_a_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size

    def window_flops(self) -> int:
        """Of a window of 30 seconds, which is computed whole however short the song's last is."""
        first, second = self.convolution_weights
        positions = WINDOW_FRAMES // 2
        convolutions = 2 * (first * WINDOW_FRAMES + second * positions)
        products = 2 * self.encoder_layer_weights * positions
        attention = 4 * positions**2 * self.encoder_hidden_size
        projector = 2 * self.projector_weights * positions // 2
        return convolutions + self.encoder_layers * (products + attention) + projector

    def prefill_flops(self, num_tokens: int, num_before: int = 0) -> int:
        """Of tokens behind `num_before` that are cached; without the output layer."""
        pairs = num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
        return 2 * self.layer_weights * num_tokens + self._attention_flops(pairs)

    def decode_flops(self, lengths: Sequence[int]) -> int:
        """Of one step of rows that attend to so many tokens."""
        products = 2 * (self.layer_weights + self.output_weights) * len(lengths)
        return products + self._attention_flops(sum(lengths))

    def _attention_flops(self, pairs: int) -> int:
        """Queries times keys, and weights times values, for so many pairs of positions."""
        return 4 * pairs * self.num_layers * self.num_heads * self.head_size


REAL = Shape(
    encoder_layers=32,
    encoder_hidden_size=1280,
    encoder_intermediate_size=5120,
    num_mel_bins=128,
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18_944,
    num_heads=28,
    num_kv_heads=4,
    head_size=128,
    vocab_size=151_672,
)
"""nvidia/music-flamingo-2601-hf."""


@dataclass(frozen=True)
class Demand:
    """What is asked: songs of one length, at once, and about each the same prompts.

    `answer_tokens` has the length of each prompt's answer, `song_known` says that the songs'
    prefixes are cached.
    """

    num_songs: int
    song_seconds: float
    answer_tokens: tuple[int, ...]
    song_known: bool = False
    own_text_tokens: int = OWN_TEXT_TOKENS

    @property
    def num_windows(self) -> int:
        return math.ceil(self.song_seconds / WINDOW_SECONDS)

    @property
    def prefix_tokens(self) -> int:
        return int(self.song_seconds * EMBEDDINGS_A_SECOND) + SHARED_TEXT_TOKENS


@dataclass(frozen=True)
class Precision:
    """Bytes of a number: of the language model's layers, of everything else, of keys and values."""

    layer_bytes: float
    other_bytes: float
    kv_bytes: float


PRECISIONS = {
    "float32": Precision(4, 4, 4),
    "bfloat16": Precision(2, 2, 2),
    "float16": Precision(2, 2, 2),
    "fp8": Precision(1, 2, 2),
    "fp8-kv8": Precision(1, 2, 1),
    "4bit": Precision(0.53, 2, 2),  # with a scale of 16 bits for each 64 weights and a zero point
}


@dataclass(frozen=True)
class Phase:
    seconds: float
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class Floor:
    """The phases of a demand, and the sizes that they are made of."""

    encode: Phase
    prefill: Phase
    decode: Phase
    num_steps: int
    weight_bytes_a_step: float
    kv_bytes_a_step: float  # the mean over the steps

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.encode, self.prefill, self.decode

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def bandwidth_utilization(self, wall_seconds: float, device: Device) -> float:
        """MBU: the bytes that had to move, of those that could have."""
        moved = sum(phase.num_bytes for phase in self.phases)
        return moved / (wall_seconds * device.bytes_per_second)

    def flops_utilization(self, wall_seconds: float, device: Device) -> float:
        """MFU: the arithmetic that had to be done, of what could have been."""
        done = sum(phase.flops for phase in self.phases)
        return done / (wall_seconds * device.flops_per_second)


def find_floor(
    shape: Shape,
    demand: Demand,
    device: Device,
    precision: Precision,
    *,
    prefix_read_once: bool = True,
) -> Floor:
    encode, prefill = Phase(0, 0, 0), find_prefill(shape, demand, device, precision)
    if not demand.song_known:
        flops = demand.num_songs * demand.num_windows * shape.window_flops()
        encode = bound(flops, shape.encoder_weights * precision.other_bytes, device)
    weight_bytes = (
        shape.layer_weights * precision.layer_bytes + shape.output_weights * precision.other_bytes
    )
    token_bytes = shape.kv_values_a_token * precision.kv_bytes
    steps = [
        (shape.decode_flops(lengths), num_read * token_bytes)
        for lengths, num_read in decode_steps(demand, prefix_read_once=prefix_read_once)
    ]
    decode = join(bound(flops, weight_bytes + kv_bytes, device) for flops, kv_bytes in steps)
    return Floor(
        encode=encode,
        prefill=prefill,
        decode=decode,
        num_steps=len(steps),
        weight_bytes_a_step=weight_bytes,
        kv_bytes_a_step=sum(kv_bytes for _, kv_bytes in steps) / max(1, len(steps)),
    )


def find_prefill(shape: Shape, demand: Demand, device: Device, precision: Precision) -> Phase:
    """The songs' prefixes, then each prompt's own text behind one, and its first token."""
    own = shape.prefill_flops(demand.own_text_tokens, demand.prefix_tokens)
    flops = len(demand.answer_tokens) * (own + 2 * shape.output_weights)
    if not demand.song_known:
        flops += shape.prefill_flops(demand.prefix_tokens)
    num_bytes = (
        shape.layer_weights * precision.layer_bytes + shape.output_weights * precision.other_bytes
    )
    return bound(demand.num_songs * flops, num_bytes, device)


def decode_steps(demand: Demand, *, prefix_read_once: bool) -> Iterator[tuple[list[int], int]]:
    """For each step how far each row attends, and how many tokens' keys and values are read.

    An answer's first token comes from the prefill, so it takes a step less than it has tokens.
    """
    for step in range(1, max(demand.answer_tokens)):
        rows = sum(tokens > step for tokens in demand.answer_tokens)
        behind = demand.own_text_tokens + step
        lengths = [demand.prefix_tokens + behind] * rows * demand.num_songs
        shared = demand.num_songs * (demand.prefix_tokens + rows * behind)
        yield lengths, shared if prefix_read_once else sum(lengths)


def bound(flops: float, num_bytes: float, device: Device) -> Phase:
    """The roofline."""
    seconds = max(flops / device.flops_per_second, num_bytes / device.bytes_per_second)
    return Phase(seconds, flops, num_bytes)


def join(phases: Iterator[Phase]) -> Phase:
    known = list(phases)
    return Phase(
        sum(phase.seconds for phase in known),
        sum(phase.flops for phase in known),
        sum(phase.num_bytes for phase in known),
    )


def read_shape(config: Any) -> Shape:
    """The sizes in a configuration of transformers."""
    audio, text = config.audio_config, config.text_config
    return Shape(
        encoder_layers=audio.num_hidden_layers,
        encoder_hidden_size=audio.hidden_size,
        encoder_intermediate_size=audio.intermediate_size,
        num_mel_bins=audio.num_mel_bins,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    tokens = tuple(math.ceil(count / args.tokens_a_step) for count in args.tokens)
    demand = Demand(args.songs, args.song_seconds, tokens, args.known, args.own_text_tokens)
    precision = PRECISIONS[args.precision]
    for once in (True, False):
        found = find_floor(REAL, demand, CARDS[args.card], precision, prefix_read_once=once)
        reading = "once for all its rows" if once else "by each row, as paged attention does"
        print(f"the song's keys and values read {reading}:")
        for name, value in describe(found, args.songs, args.usd_per_second).items():
            print(f"  {name:<28}{value}")
    for name, value in describe_sizes(REAL, precision).items():
        print(f"{name:<30}{value}")
    return 0


def describe(found: Floor, num_songs: int, usd_per_second: float) -> Mapping[str, str]:
    encode, prefill, decode = found.phases
    return {
        "encode": f"{encode.seconds:.3f} s ({encode.flops / 1e12:.1f} TFLOP)",
        "prefill": f"{prefill.seconds:.3f} s ({prefill.flops / 1e12:.1f} TFLOP)",
        "decode": f"{decode.seconds:.2f} s ({found.num_steps} steps, "
        f"{found.weight_bytes_a_step / 1e9:.2f} GB of weights and "
        f"{found.kv_bytes_a_step / 1e9:.2f} GB of keys and values each, "
        f"{decode.flops / 1e12:.1f} TFLOP)",
        "together": f"{found.seconds:.2f} s",
        "a song": f"{found.seconds / num_songs:.2f} s, "
        f"{found.seconds / num_songs * usd_per_second:.5f} USD",
        "songs an hour": f"{3600 * num_songs / found.seconds:.0f}",
    }


def describe_sizes(shape: Shape, precision: Precision) -> Mapping[str, str]:
    """What lies in the device's memory."""
    others = shape.encoder_weights + 2 * shape.output_weights  # the embeddings are as large
    weights = shape.layer_weights * precision.layer_bytes + others * precision.other_bytes
    token_bytes = shape.kv_values_a_token * precision.kv_bytes
    return {
        "weights": f"{weights / 1e9:.2f} GB",
        "keys and values of a token": f"{token_bytes:,.0f} B",
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.floor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--card", choices=CARDS, default="a100-40", help="(%(default)s)")
    add("--precision", choices=PRECISIONS, default="bfloat16", help="(%(default)s)")
    add("--song-seconds", type=float, default=240.0, help="(%(default)s)")
    add("--songs", type=int, default=1, help="at once (%(default)s)")
    add("--known", action="store_true", help="the songs are cached")
    add("--tokens", type=int, nargs="+", default=REPORT_TOKENS,
        help="of each answer (the caps of a full report's sections)")  # fmt: skip
    add("--own-text-tokens", type=int, default=OWN_TEXT_TOKENS, help="(%(default)s)")
    add("--tokens-a-step", type=float, default=1.0,
        help="more than 1 with speculative decoding (%(default)s)")  # fmt: skip
    add("--usd-per-second", type=float, default=A100_USD_PER_SECOND, help="(%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
