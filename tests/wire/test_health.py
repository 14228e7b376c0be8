"""GET /health, /live and the documents."""

from tests.server import Server


def test_health_says_what_serves_and_why(server: Server) -> None:
    health = server.get("/health").json()
    assert health["status"] == "ok"
    assert health["model"] == "demo-model"
    reasons = {
        "vllm": "auto: vLLM starts here",
        "transformers": "ADAPTER_ENGINE=transformers",
    }
    assert health["engine_reason"] == reasons[health["engine"]]
    assert health["rate_source"] == "fallback"


def test_live_is_open(server: Server) -> None:
    assert server.get("/live").json() == {"status": "ok"}


def test_the_documents_examples_are_answered(server: Server) -> None:
    document = server.get("/openapi.json").json()
    for path in ("/generate", "/generate_batch"):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert set(body["examples"]) == {"text", "song"}
        for example in body["examples"].values():
            assert server.post(path, example["value"]).status_code == 200


def test_docs_are_served(server: Server) -> None:
    assert "swagger" in server.get("/docs").text.lower()


def test_one_log_line_says_which_engine_and_why(server: Server) -> None:
    health = server.get("/health").json()
    line = f"serving demo-model on {health['engine']} ({health['engine_reason']})"
    assert server.log.read_text().count(line) == 1
