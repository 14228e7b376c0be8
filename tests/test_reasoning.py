"""`reasoning` is what stands between `<think>` and `</think>`; `response` is the rest."""

import json
import shutil
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.api import create_app
from adapter.checkpoint import load_checkpoint
from adapter.prompting import Prompter
from adapter.reasoning import is_opened_by, split_reasoning
from adapter.request import EngineOutput, EngineRequest
from adapter.service import Started
from adapter.settings import Settings, load_settings
from tests.fakes import FakeEngine
from tests.test_api import ready

THOUGHT, SAID = "The bass walks\ndown.", "D minor."
WRITTEN = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        (WRITTEN, False, (THOUGHT, SAID)),
        (f"\n {WRITTEN}", False, (THOUGHT, SAID)),
        (f"{THOUGHT}\n</think>\n{SAID}", True, (THOUGHT, SAID)),
        (WRITTEN, True, (THOUGHT, SAID)),  # opened by the template and by the model
        (f"<think>{THOUGHT}", False, (THOUGHT, "")),
        (THOUGHT, True, (THOUGHT, "")),
        ("<think></think>", False, ("", "")),
        (f"<think>\n\n</think>\n\n{SAID}", False, ("", SAID)),
        ("", True, ("", "")),
        ("", False, (None, "")),
        (f" {SAID} ", False, (None, f" {SAID} ")),
        (f"<think>{THOUGHT}</think>{SAID} ", False, (THOUGHT, f"{SAID} ")),
        (f"<think>a</think>{SAID} <think>b</think>", False, ("a", f"{SAID} <think>b</think>")),
        (f"{SAID} <think>b</think>", False, (None, f"{SAID} <think>b</think>")),
        (f"{SAID}</think>", False, (None, f"{SAID}</think>")),
        ("<thinking>", False, (None, "<thinking>")),
        ("<thin", False, (None, "<thin")),
    ],
)
def test_reasoning_is_split_from_the_response(
    text: str, opened: bool, expected: tuple[str | None, str]
) -> None:
    assert split_reasoning(text, opened=opened) == expected


@given(st.text(), st.text())
def test_nothing_but_the_tags_and_white_space_is_lost(thought: str, said: str) -> None:
    thought = thought.replace("</think>", "")
    reasoning, response = split_reasoning(f"<think>{thought}</think>{said}", opened=False)
    assert (reasoning, response) == (thought.strip(), said.lstrip())


@pytest.mark.parametrize(
    ("end", "opened"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ],
)
def test_a_template_opens_reasoning_where_it_leaves_the_tag_open(end: str, opened: bool) -> None:
    assert is_opened_by(end) is opened


# Through the API


class WritingEngine(FakeEngine):
    """Answers each prompt with the token ids of one plain text, cut at the prompt's cap."""

    def __init__(self, model: Path, text: str) -> None:
        super().__init__(continuous=True)
        tokenizer = Prompter(load_checkpoint(str(model)))._plain_tokenizer
        self._token_ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    async def generate(
        self, prepared: Sequence[EngineRequest]
    ) -> AsyncGenerator[EngineOutput, None]:
        (request,) = prepared
        cap = request.sampling.max_new_tokens
        written = self._token_ids[:cap]
        yield EngineOutput(
            request_id=request.request_id,
            token_ids=written,
            finish_reason="length" if len(self._token_ids) > cap else "stop",
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=0,
        )


async def answer(model: Path, text: str, path: str = "/generate", **body: Any) -> Any:
    """What the API answers where the engine writes `text`."""

    def start(settings: Settings) -> Started:
        checkpoint = load_checkpoint(settings.model)
        return Started(checkpoint, WritingEngine(model, text), "a test")

    app = create_app(
        load_settings({"ADAPTER_MODEL": str(model), "ADAPTER_USAGE_DB": ""}), start=start
    )
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http,
    ):
        await ready(http)
        return (await http.post(path, json=body)).json()


@pytest.fixture
def opening_model(random_model: Path, tmp_path: Path) -> Path:
    """The demo checkpoint with a chat template that begins each answer with `<think>`."""
    directory = Path(shutil.copytree(random_model, tmp_path / "opening"))
    template = directory / "chat_template.jinja"
    opened = template.read_text().replace("assistant\\n", "assistant\\n<think>\\n")
    assert opened.endswith("<think>\\n' -}}{%- endif -%}")
    template.write_text(opened)
    return directory


async def test_an_answer_has_its_reasoning_apart(random_model: Path) -> None:
    got = await answer(random_model, WRITTEN)
    assert (got["reasoning"], got["response"]) == (THOUGHT, SAID)
    assert got["finish_reason"] == "stop"


async def test_a_batch_has_it_too(random_model: Path) -> None:
    got = await answer(random_model, WRITTEN, "/generate_batch", prompts=[{}, {}])
    assert [(a["reasoning"], a["response"]) for a in got["answers"]] == [(THOUGHT, SAID)] * 2


async def test_an_answer_without_tags_has_no_reasoning(random_model: Path) -> None:
    got = await answer(random_model, SAID)
    assert (got["reasoning"], got["response"]) == (None, SAID)


async def test_an_answer_that_is_cut_while_it_thinks_is_all_reasoning(random_model: Path) -> None:
    whole = await answer(random_model, WRITTEN)
    got = await answer(random_model, WRITTEN, max_new_tokens=14)
    assert got["response"] == "" and got["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 14
    assert got["reasoning"] and whole["reasoning"].startswith(got["reasoning"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}\n</think>\n\n{SAID}", (THOUGHT, SAID)),
        (THOUGHT, (THOUGHT, "")),
        (WRITTEN, (THOUGHT, SAID)),
    ],
)
async def test_a_template_may_have_opened_the_reasoning(
    opening_model: Path, text: str, expected: tuple[str, str]
) -> None:
    got = await answer(opening_model, text)
    assert (got["reasoning"], got["response"]) == expected


async def test_a_prompt_that_speaks_of_the_tags_opens_nothing(random_model: Path) -> None:
    got = await answer(random_model, SAID, prompt="Begin with <think>")
    assert (got["reasoning"], got["response"]) == (None, SAID)


@pytest.mark.parametrize("special", [False, True])
def test_tags_that_are_tokens_of_their_own_stay_in_the_text(
    random_model: Path, tmp_path: Path, special: bool
) -> None:
    """Special tokens are skipped in an answer's text, but these two make its reasoning."""
    directory = Path(shutil.copytree(random_model, tmp_path / "model"))
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    added = content["added_tokens"]
    next_id = 1 + max(token["id"] for token in added)
    added += [
        {**added[0], "id": next_id + i, "content": tag, "special": special}
        for i, tag in enumerate(["<think>", "</think>"])
    ]
    file.write_text(json.dumps(content))
    prompter = Prompter(load_checkpoint(str(directory)))
    end_of_turn = load_checkpoint(str(directory)).eos_token_ids[0]
    assert prompter.decode([next_id, 7, next_id + 1, 8, end_of_turn]) == (
        "<think>" + prompter.decode([7]) + "</think>" + prompter.decode([8])
    )
