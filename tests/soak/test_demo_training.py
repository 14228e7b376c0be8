"""What the demo model is trained on is what is served: the same tokens, the same logits."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo_training import stages
from demo_training.clock import NUM_CODE_DIMS, hold_clock
from demo_training.hearing import answer_logits, hear, prefill
from demo_training.lessons import IGNORED, Course, Scribe
from demo_training.network import SHAPE, build_network
from demo_training.questions import Question, draw_questions
from demo_training.songs import MadeSong, make_song
from demo_training.tokenizer import NUM_NUMBERS, build_tokenizer

from adapter.random_model import build_processor

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def processor() -> Any:
    return build_processor(build_tokenizer(), SHAPE)


@pytest.fixture(scope="module")
def model(processor: Any) -> Any:
    return build_network(processor.tokenizer, seed=0).eval()


def asked(seconds: int) -> tuple[MadeSong, list[Question]]:
    rng = np.random.default_rng(seconds)
    song = make_song(rng, seconds, num_parts=3)
    return song, draw_questions(rng, song, ["second", "tempo", "music_theory"])


def served_logits(model: Any, processor: Any, song: MadeSong, question: Question) -> torch.Tensor:
    content = [
        {"type": "audio", "audio": song.samples},
        {"type": "text", "text": question.prompt},
    ]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
    )
    num_prompt_tokens = inputs["input_ids"].shape[1]
    answer = torch.tensor([processor.tokenizer.encode(question.answer)])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return model(**inputs).logits[0, num_prompt_tokens - 1 :]


@pytest.mark.parametrize("seconds", [7, 30, 67])
@torch.no_grad()
def test_training_sees_the_logits_that_are_served(model: Any, processor: Any, seconds: int) -> None:
    scribe = Scribe(processor)
    song, questions = asked(seconds)
    rows = scribe.write_rows([questions])

    audio = hear(model, scribe.extract([song], seconds), seconds)
    before, behind = torch.tensor([scribe.before_audio]), torch.tensor([scribe.behind_audio])
    cache = prefill(model, audio, before, behind)
    logits = answer_logits(model, cache, rows.token_ids)

    for index, question in enumerate(questions):
        trained = logits[0, index, rows.labels[0, index] != IGNORED]
        served = served_logits(model, processor, song, question)
        torch.testing.assert_close(trained, served, atol=1e-4, rtol=1e-4)


def test_a_number_that_is_spoken_of_is_one_token(processor: Any) -> None:
    tokenizer = processor.tokenizer

    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(NUM_NUMBERS))
    assert tokenizer.encode("second 45 to")[2] == tokenizer.encode('"bpm":45,')[3]


def test_any_text_has_tokens_and_comes_back(processor: Any) -> None:
    for text in ('What is "Straße" 2026?\n\n', "初音ミク", '{"key":"A","bpm":120}'):
        assert processor.tokenizer.decode(processor.tokenizer.encode(text)) == text


class StoppedError(Exception):
    """Ends a training, as a kill would."""


def test_a_training_that_was_stopped_goes_on_to_the_same_weights_and_leaves_the_clock(
    model: Any, processor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(num_songs=1, seconds=(6, 8), num_parts=(1, 1), kinds=("tempo", "second"))
    taught = (stages.Stage("speak", num_steps=4, rates=(1e-3, 1e-4), course=course),)
    monkeypatch.setattr(stages, "SAVE_SECONDS", -1)  # after every step
    learn = stages.learn

    def trainee() -> stages.Trainee:
        fresh = copy.deepcopy(model)  # without the hooks
        hold_clock(fresh)
        return stages.new_trainee(fresh, Scribe(processor), seed=0)

    def stop_at_the_third(one: stages.Trainee, *args: Any) -> Any:
        if one.step == 2:
            raise StoppedError
        return learn(one, *args)

    unbroken, stopped, resumed = trainee(), trainee(), trainee()
    stages.train(unbroken, taught, 0, tmp_path / "unbroken.pt", print)
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(stages, "learn", stop_at_the_third)
        stages.train(stopped, taught, 0, tmp_path / "state.pt", print)
    resumed.load(tmp_path / "state.pt")
    assert (resumed.stage, resumed.step) == (0, 2)
    stages.train(resumed, taught, 0, tmp_path / "state.pt", print)

    for name, weight in unbroken.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
        assert name == "model.audio_tower.embed_positions.weight" or not torch.equal(
            weight, model.state_dict()[name]
        )
    embeddings = (one.model.language_model.embed_tokens.weight for one in (model, unbroken.model))
    before, after = (weight[:, :NUM_CODE_DIMS] for weight in embeddings)
    assert torch.equal(before, after)
