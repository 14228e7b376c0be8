"""POST /full_report on a real server."""

from typing import Any

import jsonschema
import pytest

from tests.server import Server
from tests.wire.audio import as_base64, song


@pytest.fixture(scope="module")
def presets(server: Server) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = server.get("/presets").json()["presets"]
    return listed


def test_a_report_has_every_section_under_its_key_and_what_was_measured(
    server: Server, presets: list[dict[str, Any]]
) -> None:
    body = {"audio": as_base64(song(3)), "seed": 1}
    reply = server.post("/full_report", body).json()
    report, sections = reply["report"], reply["sections"]
    assert list(report) == [*(one["report_key"] for one in presets), "measured"]
    assert report["measured"]["duration_seconds"] == pytest.approx(3)
    for preset, section in zip(presets, sections, strict=True):
        assert (section["preset"], section["report_key"]) == (preset["name"], preset["report_key"])
        content = report[preset["report_key"]]
        if section["error"]:
            assert section["error"]["code"] == "incomplete_json"
            assert content == {"error": section["error"]}
        elif preset["json_schema"] is None:
            assert content == section["response"]
        else:
            jsonschema.validate(content, preset["json_schema"])
            assert content == section["data"]
    assert reply["elapsed_seconds"] == pytest.approx(sum(s["elapsed_seconds"] for s in sections))
    assert reply["cost_usd"] == pytest.approx(sum(s["cost_usd"] for s in sections))


@pytest.mark.vllm_only  # to be quick: the soak has 50 on transformers
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_no_report_has_json_that_its_form_does_not_allow(
    server: Server, presets: list[dict[str, Any]], seed: int
) -> None:
    forms = {one["name"]: one["json_schema"] for one in presets if one["json_schema"]}
    body = {"audio": as_base64(song(seed)), "sections": list(forms), "seed": 1000 * seed}
    for section in server.post("/full_report", body).json()["sections"]:
        if section["error"] is None:
            jsonschema.validate(section["data"], forms[section["preset"]])
        else:
            assert section["error"]["code"] == "incomplete_json"


def test_a_section_of_a_report_is_its_preset_asked_with_the_seed_plus_its_index(
    server: Server,
) -> None:
    audio = as_base64(song(3))
    names = ["content_advisory", "mood_tags"]
    sections = server.post("/full_report", {"audio": audio, "sections": names, "seed": 40}).json()[
        "sections"
    ]
    for index, (name, section) in enumerate(zip(names, sections, strict=True)):
        alone = {"audio": audio, "preset": name, "seed": 40 + index}
        assert server.post("/generate", alone).json()["data"] == section["data"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"sections": ["mood_tags"]}, "audio"),
        ({"audio": as_base64(song(1)), "sections": []}, "sections"),
        ({"audio": as_base64(song(1)), "sections": ["moods"]}, "sections.0"),
        ({"audio": as_base64(song(1)), "sections": ["mood_tags", "mood_tags"]}, "sections"),
        ({"audio": as_base64(song(1)), "seed": 2**63 - 1}, "seed"),
        ({"audio": as_base64(song(1)), "prompts": []}, "prompts"),
    ],
)
def test_a_bad_report_request_is_told_which_field(
    server: Server, body: dict[str, Any], field: str
) -> None:
    response = server.post("/full_report", body)
    assert response.status_code == 422
    assert response.json()["error"]["field"] == field
