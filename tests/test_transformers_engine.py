"""The transformers engine gives the answers of Hugging Face alone, whatever shares its calls."""

import asyncio
import functools
import json
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from adapter.checkpoint import load_checkpoint
from adapter.errors import (
    EngineDeadError,
    EngineError,
    EngineOutOfMemoryError,
    SettingsError,
    UnprocessableError,
)
from adapter.features import FeatureCache
from adapter.prompting import Prompter
from adapter.random_model import ModelShape, write_random_model
from adapter.request import SAMPLING_RATE, Clip, EngineOutput, EngineRequest, Sampling
from adapter.song_prefix import SongPrefix
from adapter.transformers_engine import TransformersEngine, _check_device
from tests.draws import NUM_DRAWS, distribution, p_value
from tests.reference import Reference, ReferenceAnswer
from tests.test_repetition import first_repetition

PROMPTS = (
    "Describe this music.",
    "Is there a voice in this song?",
    "Key?",
    "How does the mood of the song change between its first and its last minute, and why?",
    "Name the instruments.",
)
LENGTHS_SECONDS = (1.0, 29.9, 30.0, 31.0, 95.0)


def song(seconds: float, seed: int) -> np.ndarray:
    """A chord that swells, in noise: mono float32 at 16 kHz, another one for each seed."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    chord = sum(np.sin(2 * np.pi * pitch * t) for pitch in rng.uniform(80, 2000, 4))
    swell = 0.1 * (1 + np.sin(rng.uniform(1, 6) * t))
    return (swell * chord + 0.02 * rng.standard_normal(len(t))).astype(np.float32)


SONGS = tuple(song(seconds, seed) for seed, seconds in enumerate(LENGTHS_SECONDS))


class Bench:
    """A checkpoint under both: the engine, and the reference to hold it against."""

    def __init__(self, model_dir: Path, dtype: str = "float32", **changes: Any) -> None:
        self.checkpoint = replace(load_checkpoint(str(model_dir)), **changes)
        self.prompter = Prompter(self.checkpoint)
        self.reference = Reference(model_dir, dtype)
        self.engine = TransformersEngine.load(self.checkpoint, dtype=dtype, device="cpu")

    def request(
        self, prompt: str, samples: np.ndarray | None = None, name: str = "r", **sampling: Any
    ) -> EngineRequest:
        ids = self.prompter.encode(prompt, with_audio=samples is not None)
        num_tokens = 0 if samples is None else self.checkpoint.num_audio_tokens(len(samples))
        clip = None if samples is None else new_clip(samples)
        return EngineRequest(name, ids, clip, num_tokens, Sampling(**sampling))

    async def answer(self, *requests: EngineRequest) -> list[EngineOutput]:
        """The outputs of one call."""
        prepared = await asyncio.gather(*(self.engine.prepare(request) for request in requests))
        return [output async for output in self.engine.generate(prepared)]


def new_clip(samples: np.ndarray) -> Clip:
    uuid = str(hash(samples.tobytes()))
    return Clip(samples, uuid, len(samples) / SAMPLING_RATE, start_seconds=0.0, truncated=False)


def assert_same(output: EngineOutput, answer: ReferenceAnswer) -> None:
    decided = answer.decided()
    assert list(output.token_ids)[:decided] == answer.token_ids[:decided]
    assert output.prompt_tokens == len(answer.prompt_token_ids)


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """The keyword arguments of each call to a method, as they happen."""
    calls: list[Any] = []
    original = getattr(module, name)

    @functools.wraps(original)  # `generate()` reads the signature
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


async def reach(calls: list[Any], number: int) -> None:
    """Wait until another thread has made that many calls."""
    while len(calls) < number:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def log_slow_steps(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> tuple[list[float], list[float]]:
    """When each step of the model started and ended; each takes 0.1 s longer."""
    started, ended = [], []
    original = bench.engine._model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        started.append(time.monotonic())
        time.sleep(0.1)
        output = original(*args, **kwargs)
        ended.append(time.monotonic())
        return output

    monkeypatch.setattr(bench.engine._model, "forward", forward)
    return started, ended


def fail_forward(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, error: Exception, *, from_rows: int
) -> None:
    """Make the language model raise for calls of `from_rows` rows and more."""
    original = bench.engine._model.forward

    def forward(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids")
        rows = kwargs["inputs_embeds"] if ids is None else ids
        if len(rows) >= from_rows:
            raise error
        return original(*args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(bench.engine._model, "forward", forward)


@pytest.fixture(scope="module")
def bench(random_model: Path) -> Iterator[Bench]:
    bench = Bench(random_model)
    yield bench
    asyncio.run(bench.engine.shutdown())


@pytest.fixture
def own_bench(random_model: Path) -> Iterator[Bench]:
    """For tests that end or kill their engine."""
    bench = Bench(random_model)
    yield bench
    asyncio.run(bench.engine.shutdown())


class TestAnswers:
    @pytest.mark.parametrize("samples", SONGS, ids=[f"{s:g}s" for s in LENGTHS_SECONDS])
    async def test_a_prompt_alone_gets_the_reference_answer(
        self, bench: Bench, samples: np.ndarray
    ) -> None:
        (output,) = await bench.answer(bench.request(PROMPTS[0], samples, max_new_tokens=24))
        assert_same(output, bench.reference.answer(samples, PROMPTS[0], 24))

    async def test_rows_about_different_songs_get_their_own_answers_in_order(
        self, bench: Bench
    ) -> None:
        rows = list(zip(PROMPTS, SONGS, strict=True))
        requests = [bench.request(p, s, name=p, max_new_tokens=24) for p, s in rows]
        outputs = await bench.answer(*requests)
        assert [output.request_id for output in outputs] == list(PROMPTS)
        for output, (prompt, samples) in zip(outputs, rows, strict=True):
            assert_same(output, bench.reference.answer(samples, prompt, 24))

    async def test_rows_about_one_song_encode_it_once(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoded = count_calls(monkeypatch, bench.engine._model.model.audio_tower, "forward")
        rows = [(p, SONGS[i % 2 * 3]) for i, p in enumerate(PROMPTS)]
        outputs = await bench.answer(*(bench.request(p, s, max_new_tokens=24) for p, s in rows))
        assert len(encoded) == 2
        for output, (prompt, samples) in zip(outputs, rows, strict=True):
            assert_same(output, bench.reference.answer(samples, prompt, 24))

    async def test_rows_about_one_song_compute_it_once_and_the_next_call_not_at_all(
        self, random_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = Bench(random_model)
        passes = count_calls(monkeypatch, bench.engine._model.model.language_model, "forward")
        requests = [bench.request(p, SONGS[4], max_new_tokens=24) for p in PROMPTS]
        first = await bench.answer(*requests)
        again = await bench.answer(*requests)
        alone = await bench.answer(requests[2])
        num_song = len(passes[0]["inputs_embeds"][0])
        lengths = [step["inputs_embeds"].shape[1] for step in passes]
        assert num_song > 2000 and max(lengths[1:]) < 100
        assert [output.cached_tokens for output in first] == [0] + [num_song] * 4
        assert {output.cached_tokens for output in (*again, *alone)} == {num_song}
        for outputs in (first, again):
            for output, prompt in zip(outputs, PROMPTS, strict=True):
                assert_same(output, bench.reference.answer(SONGS[4], prompt, 24))
        assert alone[0].token_ids == again[2].token_ids
        await bench.engine.shutdown()

    async def test_the_rows_hold_what_comes_behind_the_song_alone(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Their cache does not grow with the song: this is what lets more rows into the memory."""
        calls = count_calls(monkeypatch, bench.engine._model, "forward")
        await bench.answer(*(bench.request(p, SONGS[4], max_new_tokens=24) for p in PROMPTS))
        cache = calls[-1]["past_key_values"]
        assert cache.get_seq_length() > 2000
        assert {layer.keys.shape[0] for layer in cache.layers} == {len(PROMPTS)}
        assert max(layer.keys.shape[2] for layer in cache.layers) < 200

    async def test_a_prompt_that_does_not_fit_beside_a_kept_song_is_tried_without_it(
        self, random_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = Bench(random_model)
        request = bench.request(PROMPTS[0], SONGS[1], max_new_tokens=8)
        (expected,) = await bench.answer(request)
        original = SongPrefix.shared_by

        def full(*_: Any) -> Any:
            raise torch.OutOfMemoryError("planted")

        monkeypatch.setattr(SongPrefix, "shared_by", full)
        (output,) = await bench.answer(request)
        assert output.token_ids == expected.token_ids
        assert output.cached_tokens == 0
        assert bench.engine._prefix is None
        monkeypatch.setattr(SongPrefix, "shared_by", original)
        await bench.engine.shutdown()

    async def test_prompts_without_audio_share_a_call(self, bench: Bench) -> None:
        outputs = await bench.answer(*(bench.request(p, max_new_tokens=24) for p in PROMPTS))
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            assert_same(output, bench.reference.answer(None, prompt, 24))

    async def test_the_repetition_penalty_counts_the_prompt_and_no_padding(
        self, random_model: Path, bench: Bench
    ) -> None:
        rows = list(zip(PROMPTS[:3], SONGS[:3], strict=True))
        answers = [bench.reference.answer(s, p, 24, repetition_penalty=1.4) for p, s in rows]
        # The most padded row wants to say what this checkpoint pads with.
        padded = Bench(random_model, pad_token_id=answers[0].token_ids[0])
        requests = [
            padded.request(p, s, max_new_tokens=24, repetition_penalty=1.4) for p, s in rows
        ]
        for output, answer in zip(await padded.answer(*requests), answers, strict=True):
            assert_same(output, answer)
        await padded.engine.shutdown()

    async def test_audio_flamingo_3_answers_too(self, tmp_path: Path) -> None:
        shape = ModelShape(
            architecture="AudioFlamingo3ForConditionalGeneration", max_audio_seconds=600
        )
        write_random_model(tmp_path / "af3", shape=shape)
        bench = Bench(tmp_path / "af3")
        rows = list(zip(PROMPTS[:2], SONGS[3:], strict=True))
        outputs = await bench.answer(*(bench.request(p, s, max_new_tokens=16) for p, s in rows))
        for output, (prompt, samples) in zip(outputs, rows, strict=True):
            assert_same(output, bench.reference.answer(samples, prompt, 16))
        await bench.engine.shutdown()


class TestDtypes:
    @pytest.mark.parametrize(
        "architecture",
        ["MusicFlamingoForConditionalGeneration", "AudioFlamingo3ForConditionalGeneration"],
    )
    @pytest.mark.parametrize(("dtype", "margin"), [("bfloat16", 0.1), ("float16", 0.02)])
    async def test_half_precision_gives_the_float32_answer_where_it_is_clear(
        self, tmp_path: Path, architecture: Any, dtype: str, margin: float
    ) -> None:
        """The first 16 greedy tokens, up to the first whose two best lie within the margin."""
        write_random_model(tmp_path / "model", shape=ModelShape(architecture=architecture))
        bench = Bench(tmp_path / "model")
        half = TransformersEngine.load(bench.checkpoint, dtype=dtype, device="cpu")
        assert half._model.dtype == getattr(torch, dtype)
        decided = 0
        for samples in (None, *SONGS[:4]):
            requests = [bench.request(p, samples, max_new_tokens=16) for p in PROMPTS]
            prepared = [await half.prepare(request) for request in requests]
            outputs = [output async for output in half.generate(prepared)]
            for output, prompt in zip(outputs, PROMPTS, strict=True):
                answer = bench.reference.answer(samples, prompt, 16)
                clear = answer.decided(margin)
                assert list(output.token_ids)[:clear] == answer.token_ids[:clear]
                decided += clear
        print(f"{decided} of {16 * 5 * len(PROMPTS)} tokens are clear")
        assert decided > 80
        await half.shutdown()
        await bench.engine.shutdown()

    def test_a_device_without_float64_is_refused_before_anything_is_loaded(
        self, random_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded = count_calls(
            monkeypatch, transformers.MusicFlamingoForConditionalGeneration, "from_pretrained"
        )
        checkpoint = load_checkpoint(str(random_model))
        with pytest.raises(SettingsError, match=r"mps:0, which has no float64.*CUDA.*CPU"):
            TransformersEngine.load(checkpoint, dtype="float32", device="mps:0")
        assert loaded == []

    def test_a_checkpoint_without_time_embedding_needs_no_float64(self) -> None:
        _check_device("mps", transformers.AudioFlamingo3ForConditionalGeneration)

    async def test_the_cache_is_used_whatever_the_configuration_says(
        self, random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The real checkpoints' configuration has `use_cache: false`, a left-over of training."""
        directory = Path(shutil.copytree(random_model, tmp_path / "model"))
        config = json.loads((directory / "config.json").read_text())
        config["text_config"]["use_cache"] = False
        (directory / "config.json").write_text(json.dumps(config))
        bench = Bench(directory)
        steps = count_calls(monkeypatch, bench.engine._model.model.language_model, "forward")
        (output,) = await bench.answer(bench.request(PROMPTS[0], SONGS[0], max_new_tokens=4))
        assert len(output.token_ids) == len(steps) - 1 == 4  # one is the song's
        assert all(step["inputs_embeds"].shape[1] == 1 for step in steps[2:])
        await bench.engine.shutdown()


class TestEnds:
    async def test_each_row_is_cut_at_its_own_cap(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = count_calls(monkeypatch, bench.engine._model, "forward")
        caps = (1, 9, 4)
        outputs = await bench.answer(
            *(
                bench.request(p, SONGS[0], max_new_tokens=cap)
                for p, cap in zip(PROMPTS, caps, strict=False)
            )
        )
        answers = [bench.reference.answer(SONGS[0], p, 9).token_ids for p in PROMPTS[:3]]
        for output, answer, cap in zip(outputs, answers, caps, strict=True):
            assert list(output.token_ids) == answer[:cap]
            assert output.finish_reason == "length"
        assert len(steps) == max(caps)

    async def test_a_row_ends_with_its_end_of_turn_and_the_call_with_its_last_row(
        self, random_model: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers = [bench.reference.answer(SONGS[1], p, 24).token_ids for p in PROMPTS[:2]]
        end = answers[0][5]  # a token in the middle of the first answer, made its end
        ended = Bench(random_model, eos_token_ids=(end,))
        steps = count_calls(monkeypatch, ended.engine._model, "forward")
        caps = (24, 12)
        outputs = await ended.answer(
            *(
                ended.request(p, SONGS[1], max_new_tokens=cap)
                for p, cap in zip(PROMPTS, caps, strict=False)
            )
        )
        lengths = []
        for output, answer, cap in zip(outputs, answers, caps, strict=True):
            stop = answer.index(end) + 1 if end in answer[:cap] else None
            assert list(output.token_ids) == answer[: stop or cap]
            assert output.finish_reason == ("stop" if stop else "length")
            lengths.append(len(output.token_ids))
        assert len(steps) == max(lengths)
        await ended.engine.shutdown()


class TestSampling:
    async def test_a_row_ends_where_it_repeats_itself_if_it_asks_for_that(
        self, bench: Bench
    ) -> None:
        """A penalty below 1 makes circles; a row beside it goes on."""
        circling = {"max_new_tokens": 60, "repetition_penalty": 0.2}
        stopped, endless, short = await bench.answer(
            bench.request(PROMPTS[4], SONGS[3], stop_on_repetition=True, **circling),
            bench.request(PROMPTS[4], SONGS[3], **circling),
            bench.request(
                PROMPTS[4], SONGS[3], stop_on_repetition=True, **circling | {"max_new_tokens": 3}
            ),
        )
        assert (stopped.finish_reason, endless.finish_reason) == ("repetition", "stop")
        assert stopped.token_ids == endless.token_ids[: first_repetition(endless.token_ids)]
        assert (short.finish_reason, short.token_ids) == ("length", endless.token_ids[:3])

    async def test_nothing_of_generation_config_json_applies(
        self, random_model: Path, bench: Bench, tmp_path: Path
    ) -> None:
        directory = shutil.copytree(random_model, tmp_path / "coloured")
        coloured = {
            "do_sample": True,
            "temperature": 0.1,
            "top_k": 1,
            "top_p": 0.1,
            "repetition_penalty": 1.9,
            "no_repeat_ngram_size": 2,
            "suppress_tokens": bench.reference.answer(None, PROMPTS[0], 8).token_ids,
            "max_length": 5,
            "eos_token_id": bench.checkpoint.eos_token_ids[0],
        }
        (directory / "generation_config.json").write_text(json.dumps(coloured))
        other = Bench(directory)
        (greedy,) = await other.answer(other.request(PROMPTS[0], max_new_tokens=8))
        assert_same(greedy, bench.reference.answer(None, PROMPTS[0], 8))
        seeded = {"do_sample": True, "seed": 3, "max_new_tokens": 8}
        (drawn,) = await other.answer(other.request(PROMPTS[0], **seeded))
        (plain,) = await bench.answer(bench.request(PROMPTS[0], **seeded))
        assert drawn.token_ids == plain.token_ids
        await other.engine.shutdown()

    async def test_a_seed_gives_the_same_answer_whatever_stands_in_the_other_rows(
        self, bench: Bench
    ) -> None:
        drawn = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "max_new_tokens": 16}
        seeded = bench.request(PROMPTS[0], SONGS[0], seed=2**63 - 1, **drawn)
        other = bench.request(PROMPTS[3], SONGS[1], **drawn)
        (alone,) = await bench.answer(seeded)
        (again,) = await bench.answer(seeded)
        first, _ = await bench.answer(seeded, other)
        _, second = await bench.answer(other, seeded)
        answers = {output.token_ids for output in (alone, again, first, second)}
        assert len(answers) == 1

    async def test_answers_without_a_seed_differ(self, bench: Bench) -> None:
        request = bench.request(PROMPTS[0], do_sample=True, temperature=2.0, max_new_tokens=16)
        together = await bench.answer(*[request] * 6)
        later = await bench.answer(*[request] * 6)
        assert len({output.token_ids for output in together}) > 3
        assert {output.token_ids for output in together} != {output.token_ids for output in later}

    @pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_p": 0.0}])
    async def test_no_temperature_or_no_top_p_is_greedy(
        self, bench: Bench, sampling: dict[str, float]
    ) -> None:
        request = bench.request(PROMPTS[0], do_sample=True, max_new_tokens=16, **sampling)
        (output,) = await bench.answer(request)
        assert_same(output, bench.reference.answer(None, PROMPTS[0], 16))

    @pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.9), (1.0, 1.0), (1.6, 0.95)])
    async def test_draws_follow_the_distribution_of_the_reference_logits(
        self, bench: Bench, temperature: float, top_p: float
    ) -> None:
        """The seeds make the draws the same in each run."""
        logits = bench.reference.first_logits(SONGS[0], PROMPTS[0])
        expected = distribution(logits, temperature=temperature, top_p=top_p)
        drawn = await draw(bench, temperature=temperature, top_p=top_p)
        p = p_value(drawn, expected)
        print(f"{len(drawn)} of {len(expected)} tokens drawn, p = {p:.3f}")
        assert len(expected) > 3
        assert p > 0.001

    async def test_no_top_k_is_hidden(self, bench: Bench) -> None:
        """50 is what transformers takes where none is set, 20 what this checkpoint asks for."""
        drawn = await draw(bench, temperature=2.0, top_p=1.0)
        logits = bench.reference.first_logits(SONGS[0], PROMPTS[0])
        best = set(np.argsort(-logits)[:50].tolist())
        assert len(set(drawn) - best) > 10


async def draw(bench: Bench, *, temperature: float, top_p: float) -> Counter[int]:
    """The first tokens that as many seeds give, all rows in one call."""
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p}
    request = bench.request(PROMPTS[0], SONGS[0], max_new_tokens=1, **sampling)
    outputs = await bench.answer(
        *(
            replace(request, sampling=replace(request.sampling, seed=seed))
            for seed in range(NUM_DRAWS)
        )
    )
    return Counter(output.token_ids[0] for output in outputs)


class TestCancelling:
    async def test_leaving_frees_the_thread_within_a_step(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started, ended = log_slow_steps(monkeypatch, bench)
        request = bench.request(PROMPTS[0], SONGS[0], max_new_tokens=2000)
        task = asyncio.create_task(bench.answer(request))
        await reach(started, 3)
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()  # an impatient caller changes nothing
        await asyncio.wait([task])
        assert task.cancelled()
        assert len(started) == len(ended) <= 4

    async def test_the_next_call_is_untouched(self, bench: Bench) -> None:
        long = bench.request(PROMPTS[1], SONGS[0], max_new_tokens=2000)
        task = asyncio.create_task(bench.answer(long))
        await asyncio.sleep(0.1)
        task.cancel()
        (output,) = await bench.answer(bench.request(PROMPTS[0], SONGS[0], max_new_tokens=8))
        assert_same(output, bench.reference.answer(SONGS[0], PROMPTS[0], 8))
        assert task.cancelled()

    async def test_shutdown_stops_the_running_call_and_may_come_twice(
        self, own_bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = count_calls(monkeypatch, own_bench.engine._model, "forward")
        request = own_bench.request(PROMPTS[0], max_new_tokens=2000)
        task = asyncio.create_task(own_bench.answer(request))
        await reach(steps, 1)
        await own_bench.engine.shutdown()
        await own_bench.engine.shutdown()
        with pytest.raises(EngineDeadError):
            await task
        assert len(steps) < 500
        with pytest.raises(EngineDeadError):
            await own_bench.engine.check_health()
        with pytest.raises(EngineDeadError):
            await own_bench.engine.prepare(request)


class TestErrors:
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"),
        ],
        ids=["cuda", "cpu"],
    )
    async def test_too_many_rows_for_the_memory_leave_the_engine_working(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        fail_forward(monkeypatch, bench, error, from_rows=3)
        requests = [bench.request(p, SONGS[0], max_new_tokens=8) for p in PROMPTS]
        with pytest.raises(EngineOutOfMemoryError, match=r"5 prompts.*group_size"):
            await bench.answer(*requests)
        await bench.engine.check_health()
        for output, prompt in zip(await bench.answer(*requests[:2]), PROMPTS, strict=False):
            assert_same(output, bench.reference.answer(SONGS[0], prompt, 8))

    async def test_any_other_error_is_the_calls_own_and_logged_once(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        request = bench.request(PROMPTS[0], max_new_tokens=8)
        with monkeypatch.context() as planted:
            fail_forward(planted, bench, RuntimeError("planted"), from_rows=1)
            with caplog.at_level(logging.ERROR), pytest.raises(EngineError) as raised:
                await bench.answer(request)
        assert str(raised.value.__cause__) == "planted"
        assert not isinstance(raised.value, EngineDeadError | EngineOutOfMemoryError)
        assert [record.exc_info is not None for record in caplog.records] == [True]
        (output,) = await bench.answer(request)
        assert_same(output, bench.reference.answer(None, PROMPTS[0], 8))

    async def test_an_assertion_on_the_device_is_the_end_of_the_engine(
        self, own_bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        error = RuntimeError("CUDA error: device-side assert triggered")
        fail_forward(monkeypatch, own_bench, error, from_rows=1)
        with pytest.raises(EngineDeadError):
            await own_bench.answer(own_bench.request(PROMPTS[0]))
        with pytest.raises(EngineDeadError):
            await own_bench.engine.check_health()

    async def test_rows_that_cannot_share_a_call_are_refused(self, bench: Bench) -> None:
        with pytest.raises(ValueError, match="must share"):
            await bench.answer(bench.request("a"), bench.request("b", SONGS[0]))
        with pytest.raises(ValueError, match="must share"):
            await bench.answer(
                bench.request("a", do_sample=True, temperature=0.5),
                bench.request("b", do_sample=True, temperature=0.6),
            )

    async def test_audio_that_gives_another_number_of_tokens_is_refused(self, bench: Bench) -> None:
        request = bench.request(PROMPTS[0], SONGS[0])
        wrong = replace(request, num_audio_tokens=request.num_audio_tokens + 1)
        with pytest.raises(UnprocessableError, match="audio tokens"):
            await bench.engine.prepare(wrong)

    @pytest.mark.parametrize("tail_samples", [1, 320])
    async def test_a_last_window_without_a_token_never_reaches_the_model(
        self, bench: Bench, tail_samples: int
    ) -> None:
        samples = song(30 + tail_samples / SAMPLING_RATE, seed=9)
        with pytest.raises(UnprocessableError, match="20 ms"):
            await bench.engine.prepare(bench.request(PROMPTS[0], samples))

    def test_a_checkpoint_that_lacks_weights_does_not_load(
        self, random_model: Path, tmp_path: Path
    ) -> None:
        from safetensors.torch import load_file, save_file

        directory = shutil.copytree(random_model, tmp_path / "lacking")
        weights = load_file(directory / "model.safetensors")
        lost = next(name for name in weights if "linear_1.weight" in name)
        save_file(
            {name: value for name, value in weights.items() if name != lost},
            directory / "model.safetensors",
            metadata={"format": "pt"},
        )
        with pytest.raises(SettingsError, match=r"1 weights .*linear_1\.weight"):
            TransformersEngine.load(load_checkpoint(str(directory)), dtype="float32", device="cpu")

    def test_an_unknown_dtype_does_not_load(self, random_model: Path) -> None:
        with pytest.raises(SettingsError, match="float8"):
            TransformersEngine.load(
                load_checkpoint(str(random_model)), dtype="float8", device="cpu"
            )


class TestFeatures:
    async def test_features_that_nobody_waits_for_any_more_are_not_begun(self) -> None:
        began: list[int] = []
        release = threading.Event()

        def extractor(chunks: Any, **_: Any) -> Any:
            began.append(len(chunks[0]))
            release.wait(10)
            return {"input_features": torch.zeros(1), "input_features_mask": None} | {
                "attention_mask": torch.zeros(1)
            }

        extractor.chunk_length = 30  # type: ignore[attr-defined]
        cache = FeatureCache(extractor, max_clips=4)
        clips = [new_clip(np.zeros(length, np.float32)) for length in (1, 2, 3, 4)]
        asking = [asyncio.create_task(cache.get(clip)) for clip in clips]
        twin = asyncio.create_task(cache.get(clips[2]))
        await asyncio.sleep(0.1)
        for task in asking[1:]:
            task.cancel()
        await asyncio.sleep(0.1)
        release.set()
        await asyncio.gather(asking[0], twin)
        cache.shutdown()
        assert began == [1, 3]

    async def test_thirteen_prompts_about_one_song_make_its_features_once(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = count_extractions(monkeypatch)
        request = bench.request(PROMPTS[0], song(12.3, seed=20))
        made.clear()
        prepared = await asyncio.gather(*(bench.engine.prepare(request) for _ in range(13)))
        assert len(made) == 1
        assert len({id(row.features) for row in prepared}) == 1

    async def test_the_first_asker_may_leave(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        request = bench.request(PROMPTS[0], song(12.3, seed=21))
        made = count_extractions(monkeypatch)
        first, second = (asyncio.create_task(bench.engine.prepare(request)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).features is not None
        assert len(made) == 1

    async def test_only_the_last_few_songs_are_kept(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        requests = [bench.request(PROMPTS[0], song(0.5, seed)) for seed in range(30, 36)]
        made = count_extractions(monkeypatch)
        for request in (*requests, requests[-1], requests[0]):
            await bench.engine.prepare(request)
        assert len(made) == len(requests) + 1

    async def test_features_are_those_of_the_processor(self, bench: Bench) -> None:
        inputs = bench.reference.inputs(SONGS[4], PROMPTS[0])
        features = (await bench.engine.prepare(bench.request(PROMPTS[0], SONGS[4]))).features
        assert torch.equal(features.input_features, inputs["input_features"])
        assert torch.equal(features.input_features_mask, inputs["input_features_mask"])

    async def test_a_failure_is_not_kept(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        request = bench.request(PROMPTS[0], song(0.7, seed=40))

        def fail(*_: Any) -> None:
            raise RuntimeError("planted")

        with monkeypatch.context() as planted:
            planted.setattr("adapter.features.extract_features", fail)
            with pytest.raises(EngineError):
                await bench.engine.prepare(request)
        assert (await bench.engine.prepare(request)).features is not None


def count_extractions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    import adapter.features

    return count_calls(monkeypatch, adapter.features, "extract_features")


async def test_the_event_loop_stays_free_while_a_call_runs(bench: Bench) -> None:
    requests = [bench.request(p, song(95, seed=50), max_new_tokens=32) for p in PROMPTS]
    longest_seconds, watch = 0.0, True

    async def tick() -> None:
        nonlocal longest_seconds
        while watch:
            start = time.monotonic()
            await asyncio.sleep(0.005)
            longest_seconds = max(longest_seconds, time.monotonic() - start)

    ticking = asyncio.create_task(tick())
    start = time.monotonic()
    await bench.answer(*requests)
    call_seconds = time.monotonic() - start
    watch = False
    await ticking
    print(f"longest hold {longest_seconds:.3f} s of {call_seconds:.3f} s")
    assert longest_seconds < call_seconds / 4
