"""A song's loudness as EBU R 128 has it, from the file's own rate and channels.

The levels are those of EBU Tech 3341, table 1, whose signals are sines of 1 kHz.
"""

import tempfile
from typing import Any

import numpy as np
import pytest

from adapter import decoder_worker
from adapter.loudness import Loudness
from tests.songs import Samples, encode, melody, wav_header

FULL_LUFS = -3.01  # a sine of full scale in one channel


def decode(data: bytes, *, measure_loudness: bool = True) -> dict[str, Any]:
    with tempfile.TemporaryFile() as encoded, tempfile.TemporaryFile() as samples:
        encoded.write(data)
        encoded.flush()
        return decoder_worker.decode(encoded.fileno(), samples.fileno(), 600, measure_loudness)


def loudness_of(samples: Samples, name: str = "wav-float", rate: int = 48_000) -> float | None:
    lufs: float | None = decode(encode(samples, name, rate=rate))["loudness_lufs"]
    return lufs


def sine(*levels_dbfs: float | None, seconds: float = 20, rate: int = 48_000) -> Samples:
    """A sine with a peak level for each channel, None for silence."""
    wave = np.sin(2 * np.pi * 1_000 * np.arange(round(seconds * rate)) / rate)
    return np.stack([wave * (0 if level is None else 10 ** (level / 20)) for level in levels_dbfs])


@pytest.mark.parametrize("level", [-23, -33, -18, -60])
def test_a_stereo_sine_has_its_level(level: float) -> None:
    assert loudness_of(sine(level, level)) == pytest.approx(level, abs=0.1)


def test_a_sine_of_full_scale_in_one_channel_has_3_less() -> None:
    assert loudness_of(sine(0)) == pytest.approx(FULL_LUFS, abs=0.1)


def test_what_is_far_below_the_rest_does_not_count() -> None:
    song = np.concatenate(
        [
            sine(level, level, seconds=seconds)
            for level, seconds in ((-36, 10), (-23, 60), (-36, 10))
        ]
        + [np.zeros((2, 20 * 48_000))],
        axis=1,
    )
    assert loudness_of(song) == pytest.approx(-23, abs=0.1)


def test_channels_behind_count_more_and_the_low_ones_not() -> None:
    samples = sine(-28, -28, -24, None, -30, -30)
    assert loudness_of(samples) == pytest.approx(-23, abs=0.1)
    assert loudness_of(samples, "flac") == pytest.approx(-23, abs=0.1)
    loud_below = sine(-28, -28, -24, -10, -30, -30)
    assert loudness_of(loud_below) == pytest.approx(-23, abs=0.1)


def test_channels_without_names_are_in_the_usual_order() -> None:
    samples = sine(-28, -28, -24, -10, -30, -30, seconds=5)
    pcm = np.rint(samples.T * 2**15).astype("<i2").tobytes()
    data = wav_header(len(pcm), rate=48_000, num_channels=6) + pcm
    assert decode(data)["loudness_lufs"] == pytest.approx(-23, abs=0.1)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 96_000, 192_000])
def test_any_rate_from_8_khz_gives_the_same(rate: int) -> None:
    samples = sine(-23, -23, seconds=5, rate=rate)
    assert loudness_of(samples, rate=rate) == pytest.approx(-23, abs=0.1)


def test_it_is_that_of_the_channels_and_not_of_their_mean() -> None:
    samples = sine(-23, -23)
    samples[1] *= -1  # the mean is silence
    assert loudness_of(samples) == pytest.approx(-23, abs=0.1)


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros((2, 480_000)),
        sine(-90, -90),
        sine(-10, -10, seconds=0.3),  # less than the 0.4 seconds that are compared
        sine(100, 100, seconds=2),
    ],
)
def test_what_the_scale_does_not_reach_has_none(samples: Samples) -> None:
    assert loudness_of(samples) is None


def test_samples_that_are_no_numbers_count_as_silence() -> None:
    samples = sine(-23, -23)
    samples[0, 100_000:100_010] = np.nan
    samples[1, 200_000] = np.inf
    assert loudness_of(samples) == pytest.approx(-23, abs=0.1)


@pytest.mark.parametrize(
    "data",
    [
        encode(melody(1) * 0.5, "mp3") + encode(melody(1, 48_000, 1), "mp3-320k"),
        wav_header(9 * 96_000, rate=48_000, num_channels=9) + b"\x10" * 9 * 96_000,
        encode(melody(2, 4_000), "wav-16", rate=4_000),
    ],
    ids=["its shape changes", "nine channels", "4 kHz"],
)
def test_where_it_cannot_be_told_the_song_is_heard_all_the_same(data: bytes) -> None:
    answer = decode(data)
    assert answer["loudness_lufs"] is None
    assert answer["num_samples"] == decode(data, measure_loudness=False)["num_samples"] > 0


def test_a_filter_that_fails_costs_the_loudness_alone() -> None:
    loudness = Loudness()
    for _ in range(2):
        loudness.write(np.zeros((4_800, 2), np.float32), 48_000, "no such layout")
    assert loudness.finish() is None


def test_it_is_not_measured_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(decoder_worker, "Loudness")
    data = encode(melody(1), "flac")
    assert decode(data, measure_loudness=False)["loudness_lufs"] is None
