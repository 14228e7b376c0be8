"""scripts/benchmarks/floor.py, by numbers computed by hand for the real configuration."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from benchmarks import floor
from benchmarks.floor import CARDS, PRECISIONS, REAL, Demand, Device, find_floor

A100 = CARDS["a100-40"]
BF16 = PRECISIONS["bfloat16"]
SONG = Demand(num_songs=1, song_seconds=240, answer_tokens=(64,) * 13)


def test_the_weights_of_the_real_configuration() -> None:
    # A layer: q and o 3584 x 3584 each, k and v 3584 x 512 each, three of 3584 x 18944.
    assert REAL.layer_weights == 28 * (2 * 12_845_056 + 2 * 1_835_008 + 3 * 67_895_296)
    assert REAL.layer_weights == 6_525_288_448
    assert REAL.output_weights == 3584 * 151_672 == 543_592_448
    assert REAL.encoder_layer_weights == 4 * 1280**2 + 2 * 1280 * 5120 == 19_660_800
    assert REAL.projector_weights == 1280 * 3584 + 3584 * 3584 == 17_432_576
    # Besides these there are only biases, norms and the encoder's 1500 x 1280 positions.
    matrices = REAL.layer_weights + 2 * REAL.output_weights + REAL.encoder_weights
    assert 8_267_215_360 - matrices == 2_757_120


def test_a_decode_step_reads_all_weights_but_the_embeddings() -> None:
    found = find_floor(REAL, SONG, A100, BF16)
    assert found.weight_bytes_a_step == 2 * (6_525_288_448 + 543_592_448) == 14_137_761_792


def test_a_token_has_keys_and_values_in_each_layer() -> None:
    assert REAL.kv_values_a_token == 2 * 28 * 4 * 128 == 28_672


def test_a_window_of_the_encoder_takes_two_teraflops() -> None:
    convolutions = 2 * 128 * 3 * 1280 * 3000 + 2 * 1280 * 3 * 1280 * 1500
    layers = 32 * (2 * 19_660_800 * 1500 + 4 * 1500 * 1500 * 1280)
    assert REAL.window_flops() == convolutions + layers + 2 * 17_432_576 * 750
    assert REAL.window_flops() == pytest.approx(2.30e12, rel=0.01)


def test_the_last_window_is_computed_whole() -> None:
    assert Demand(1, 30.0, (1,)).num_windows == 1
    assert Demand(1, 30.1, (1,)).num_windows == 2


def test_a_prefill_is_twice_its_weights_and_the_causal_half_of_its_attention() -> None:
    assert REAL.prefill_flops(6016) == 2 * 6_525_288_448 * 6016 + 28 * 2 * 6016 * 6017 * 3584
    tail = 2 * 6_525_288_448 * 16 + 28 * 4 * (16 * 6016 + 16 * 17 // 2) * 3584
    assert REAL.prefill_flops(16, 6016) == tail


def test_a_prefill_in_two_pieces_takes_what_it_takes_in_one() -> None:
    pieces = REAL.prefill_flops(4000) + REAL.prefill_flops(2016, num_before=4000)
    assert pieces == REAL.prefill_flops(6016)


def test_a_song_that_is_known_costs_its_prompts_alone() -> None:
    new = find_floor(REAL, SONG, A100, BF16)
    known = find_floor(REAL, Demand(1, 240, (64,) * 13, song_known=True), A100, BF16)
    assert known.encode.flops == known.encode.seconds == 0
    assert new.encode.flops == 8 * REAL.window_flops()
    assert new.prefill.flops - known.prefill.flops == REAL.prefill_flops(6016)
    assert known.decode == new.decode


def test_an_answer_takes_a_step_less_than_it_has_tokens() -> None:
    steps = list(floor.decode_steps(Demand(1, 240, (3, 2, 1)), prefix_read_once=False))
    # Each row has 6000 tokens of audio, 16 before them, 16 behind them, and what it decoded.
    assert steps == [([6033, 6033], 2 * 6033), ([6034], 6034)]


def test_a_prefix_that_is_read_once_is_read_once_for_each_song() -> None:
    (_, num_read), *_ = floor.decode_steps(Demand(2, 240, (2, 2)), prefix_read_once=True)
    assert num_read == 2 * (6016 + 2 * 17)


def test_a_decode_step_on_an_a100_takes_the_time_of_its_bytes() -> None:
    found = find_floor(REAL, SONG, A100, BF16)
    kv_bytes = 57_344 * (6016 + 13 * (16 + 32))  # in the middle of 63 steps
    assert found.num_steps == 63
    assert found.kv_bytes_a_step == pytest.approx(kv_bytes)
    assert found.decode.seconds == pytest.approx(63 * (14_137_761_792 + kv_bytes) / 1555e9)


def test_a_slow_matrix_unit_makes_a_phase_as_long_as_its_arithmetic() -> None:
    slow = Device("slow", 1555e9, 1e9)
    found = find_floor(REAL, SONG, slow, BF16)
    assert found.encode.seconds == pytest.approx(8 * REAL.window_flops() / 1e9)
    assert found.decode.seconds == pytest.approx(found.decode.flops / 1e9)


def test_a_run_at_the_floor_of_its_bytes_uses_the_whole_bandwidth() -> None:
    narrow = Device("narrow", 1e9, 1e30)
    found = find_floor(REAL, SONG, narrow, BF16)
    assert found.bandwidth_utilization(found.seconds, narrow) == pytest.approx(1)
    assert found.bandwidth_utilization(2 * found.seconds, narrow) == pytest.approx(0.5)
    narrow = Device("narrow", 1e30, 1e12)
    found = find_floor(REAL, SONG, narrow, BF16)
    assert found.flops_utilization(found.seconds, narrow) == pytest.approx(1)


def test_fp8_halves_the_layers_and_nothing_else() -> None:
    found = find_floor(REAL, SONG, A100, PRECISIONS["fp8"])
    assert found.weight_bytes_a_step == 6_525_288_448 + 2 * 543_592_448


def test_the_sizes_are_those_of_the_configuration() -> None:
    import transformers

    audio = transformers.AudioFlamingo3EncoderConfig(
        num_mel_bins=128,
        num_hidden_layers=32,
        hidden_size=1280,
        num_attention_heads=20,
        intermediate_size=5120,
    )
    text = transformers.Qwen2Config(
        vocab_size=151_672,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    )
    config = transformers.MusicFlamingoConfig(audio_config=audio, text_config=text)
    assert floor.read_shape(config) == REAL


def test_a_report_on_paper_is_printed_with_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    assert floor.main(["--tokens", "2048", "--songs", "2"]) == 0
    output = capsys.readouterr().out
    assert "2047 steps, 14.14 GB of weights" in output
    assert "USD" in output and "songs an hour" in output
