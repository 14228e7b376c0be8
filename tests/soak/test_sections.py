"""Many reports on random weights, the hardest case for a grammar: JSON is valid or says that it
was cut."""

import re
from collections import Counter
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from adapter.presets import built_in_presets
from tests.server import Server, running_server
from tests.wire.audio import as_base64, song

PRESETS = built_in_presets()
IN_JSON = {preset.name: preset for preset in PRESETS if preset.json_schema}
TEXT_TOKENS = 32


def presets_with_short_texts(path: Path) -> Path:
    """The built-in presets, those in text with a cap of 32 tokens."""
    tables = files("adapter").joinpath("presets.toml").read_text().split("[[presets]]")
    short = [
        table if "json_schema" in table else re.sub(r"(max_new_tokens) = \d+", r"\1 = 32", table)
        for table in tables[1:]
    ]
    path.write_text("".join(f"[[presets]]{table}" for table in short))
    return path


def ask_for_reports(server: Server, num_reports: int) -> Counter[str]:
    """How many sections in JSON came whole, and how many were cut; each is one or the other."""
    outcomes: Counter[str] = Counter()
    for number in range(num_reports):
        body = {"audio": as_base64(song(2 + number % 5)), "seed": 100 * number}
        reply = server.post("/full_report", body, timeout_seconds=600).json()
        assert len(reply["sections"]) == len(PRESETS)
        for section in reply["sections"]:
            content = reply["report"][section["report_key"]]
            if section["preset"] not in IN_JSON:
                assert section["error"] is None and content == section["response"]
                assert section["usage"]["completion_tokens"] <= TEXT_TOKENS
            elif section["error"] is None:
                jsonschema.validate(content, IN_JSON[section["preset"]].json_schema)
                assert content == section["data"]
                outcomes["whole"] += 1
            else:
                assert section["error"]["code"] == "incomplete_json"
                assert (section["data"], section["finish_reason"]) == (None, "length")
                assert content == {"error": section["error"]}
                outcomes["cut"] += 1
    return outcomes


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "num_reports"), [("transformers", 50), ("vllm", 200)])
@pytest.mark.timeout(7200)
def test_every_section_is_valid_or_says_that_it_was_cut(
    engine: str, num_reports: int, random_model: Path, tmp_path: Path
) -> None:
    settings = {
        "ADAPTER_ENGINE": engine,
        "ADAPTER_PRESETS": str(presets_with_short_texts(tmp_path / "presets.toml")),
        "ADAPTER_REQUEST_TIMEOUT_SECONDS": "600",
    }
    with running_server(random_model, tmp_path / "log", settings) as server:
        outcomes = ask_for_reports(server, num_reports)
    print(f"{engine}: {num_reports} reports, {dict(outcomes)}")
    assert outcomes.total() == num_reports * len(IN_JSON)
    assert outcomes["cut"] < 0.02 * outcomes.total()
