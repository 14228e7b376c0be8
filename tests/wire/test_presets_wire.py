"""GET /presets, and prompts that name one."""

import jsonschema

from tests.server import Server
from tests.wire.audio import as_base64, song


def test_every_preset_in_json_is_answered_as_its_form_says(server: Server) -> None:
    presets = server.get("/presets").json()["presets"]
    assert len(presets) == 13
    prompts = [
        {
            "preset": one["name"],
            "seed": seed,
            **({} if one["json_schema"] else {"max_new_tokens": 8}),
        }
        for seed, one in enumerate(presets)
    ]
    body = {"audio": as_base64(song(2)), "prompts": prompts}
    answers = server.post("/generate_batch", body).json()["answers"]
    for one, answer in zip(presets, answers, strict=True):
        assert answer["error"] is None, one["name"]
        if one["json_schema"] is None:
            assert answer["data"] is None
            continue
        assert answer["finish_reason"] == "stop"
        jsonschema.validate(answer["data"], one["json_schema"])


def test_the_document_shows_the_forms(server: Server) -> None:
    document = server.get("/openapi.json").json()
    assert document["components"]["schemas"]["MoodTags"]["properties"]["tags"]["maxItems"] == 6
