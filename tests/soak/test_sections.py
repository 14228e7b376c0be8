"""Many sections in JSON on random weights, the hardest case for a grammar."""

from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from adapter.presets import built_in_presets
from tests.server import Server, running_server
from tests.wire.audio import as_base64, song

IN_JSON = [preset for preset in built_in_presets() if preset.json_schema]


def ask_for_sections(server: Server, num_reports: int) -> Counter[str]:
    """How many sections came whole, and how many were cut; each is one or the other."""
    outcomes: Counter[str] = Counter()
    for report in range(num_reports):
        prompts = [
            {"preset": preset.name, "seed": report * len(IN_JSON) + index}
            for index, preset in enumerate(IN_JSON)
        ]
        body = {"audio": as_base64(song(2 + report % 5)), "prompts": prompts}
        answers = server.post("/generate_batch", body, timeout_seconds=600).json()["answers"]
        for preset, answer in zip(IN_JSON, answers, strict=True):
            if answer["error"] is None:
                jsonschema.validate(answer["data"], preset.json_schema)
                outcomes["whole"] += 1
            else:
                assert answer["error"]["code"] == "incomplete_json"
                assert (answer["data"], answer["finish_reason"]) == (None, "length")
                outcomes["cut"] += 1
    return outcomes


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "num_reports"), [("transformers", 50), ("vllm", 200)])
@pytest.mark.timeout(7200)
def test_every_section_is_valid_or_says_that_it_was_cut(
    engine: str, num_reports: int, demo_model: Path, tmp_path: Path
) -> None:
    settings = {"ADAPTER_ENGINE": engine, "ADAPTER_REQUEST_TIMEOUT_SECONDS": "600"}
    with running_server(demo_model, tmp_path / "log", settings) as server:
        outcomes = ask_for_sections(server, num_reports)
    print(f"{engine}: {num_reports} reports, {dict(outcomes)}")
    assert outcomes.total() == num_reports * len(IN_JSON)
    assert outcomes["cut"] < 0.02 * outcomes.total()
