"""API keys: who gets in, and what one key learns of another: nothing."""

from pathlib import Path

import httpx
import pytest
from starlette.types import Message

from adapter.api import create_app
from adapter.errors import UnauthorizedError
from adapter.idempotency import Replies
from adapter.keys import CacheScope, Client, Keys, key_digest
from adapter.settings import load_settings
from tests.fakes import FakeEngine
from tests.test_api import client, service_with

ANN, BOB = "ann-secret-1", "bob:secret/2"
REPLIES = dict(Replies.__init__.__kwdefaults__ or {})
PAIRS = f"ann:{ANN},bob:{BOB}"


def keys(cache_scope: CacheScope = "key") -> Keys:
    return Keys({key_digest(ANN): "ann", key_digest(BOB): "bob"}, cache_scope=cache_scope)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_names_its_client() -> None:
    assert keys().client([f"Bearer {ANN}"]).name == "ann"
    assert keys().client([f"bearer  {BOB}"]).name == "bob"


def test_a_name_may_have_two_keys_while_one_replaces_the_other() -> None:
    both = Keys({key_digest("old"): "ann", key_digest("new"): "ann"})
    assert both.client(["Bearer old"]) == both.client(["Bearer new"])


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [""],
        [ANN],
        ["Bearer"],
        ["Bearer "],
        [f"Basic {ANN}"],
        [f"Bearer {ANN}x"],
        [f"Bearer {ANN} "],
        [f"Bearer {ANN[:-1]}"],
        [f"Bearer {ANN.upper()}"],
        [f"Bearer ann:{ANN}"],
        [f"Bearer {ANN}", f"Bearer {ANN}"],
        [f"Bearer {ANN}, Bearer {BOB}"],
        ["Bearer \xff\xfe"],
    ],
)
def test_whatever_is_no_key_is_refused_without_being_repeated(sent: list[str]) -> None:
    with pytest.raises(UnauthorizedError) as caught:
        keys().client(sent)
    assert ANN not in caught.value.message


def test_without_keys_everybody_is_one_client_without_a_name() -> None:
    assert Keys({}).client([]) == Client(None, None)


def test_the_caches_of_two_keys_have_nothing_in_common() -> None:
    both = keys()
    ann, bob = (both.client([f"Bearer {key}"]) for key in (ANN, BOB))
    assert ann == both.client([f"Bearer {ANN}"])
    assert ann.cache_key != bob.cache_key
    assert ann.cache_salt != bob.cache_salt
    assert ann.cache_key is not None and ann.cache_key.hex() != ann.cache_salt


def test_the_caches_can_be_shared_by_all_keys() -> None:
    ann = keys("all").client([f"Bearer {ANN}"])
    assert (ann.name, ann.cache_key, ann.cache_salt) == ("ann", None, None)


@pytest.mark.parametrize("clients", [keys("request"), Keys({}, cache_scope="request")])
def test_a_song_can_be_forgotten_with_its_request(clients: Keys) -> None:
    first, second = (clients.client([f"Bearer {ANN}"]) for _ in range(2))
    assert first.name == second.name
    assert first.cache_key != second.cache_key


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/generate"),
        ("POST", "/generate_batch"),
        ("GET", "/metrics"),
        ("GET", "/redoc"),
        ("GET", "/docs/oauth2-redirect"),
        ("GET", "/nothing-here"),
        ("GET", "/healthy"),
        ("GET", "/health/"),
        ("GET", "/static"),
        ("DELETE", "/generate"),
        ("OPTIONS", "/generate"),
    ],
)
async def test_without_a_key_every_other_route_is_closed(
    random_model: Path, method: str, path: str
) -> None:
    async with client(random_model, FakeEngine(continuous=True), api_keys=PAIRS) as http:
        response = await http.request(method, path, json={} if method == "POST" else None)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "unauthorized"


@pytest.mark.parametrize("path", ["/health", "/live", "/docs", "/openapi.json"])
async def test_what_the_contract_leaves_open_is_open(random_model: Path, path: str) -> None:
    async with client(random_model, FakeEngine(continuous=True), api_keys=PAIRS) as http:
        assert (await http.get(path)).status_code == 200


async def test_a_key_opens_the_routes(random_model: Path) -> None:
    async with client(random_model, FakeEngine(continuous=True), api_keys=PAIRS) as http:
        for path in ("/generate", "/generate_batch"):
            body = {"prompts": [{}]} if path == "/generate_batch" else {}
            assert (await http.post(path, json=body, headers=bearer(BOB))).status_code == 200
        assert (await http.get("/metrics", headers=bearer(ANN))).status_code == 200
        assert (await http.get("/nothing-here", headers=bearer(ANN))).status_code == 404


async def test_the_document_says_which_routes_want_a_key(random_model: Path) -> None:
    async with client(random_model, FakeEngine(continuous=True), api_keys=PAIRS) as http:
        document = (await http.get("/openapi.json")).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/generate"]["post"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]


async def test_the_log_has_the_name_and_never_the_key(
    random_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with client(random_model, FakeEngine(continuous=True), api_keys=PAIRS) as http:
        caplog.set_level("DEBUG")
        await http.post("/generate", json={}, headers=bearer(BOB))
        await http.post("/generate", json={}, headers=bearer("a-wrong-key"))
    assert "key=bob" in caplog.text
    assert BOB not in caplog.text and "a-wrong-key" not in caplog.text


async def test_the_same_idempotency_key_of_two_clients_is_two_requests(random_model: Path) -> None:
    engine = FakeEngine(continuous=True)
    async with client(random_model, engine, api_keys=PAIRS) as http:
        first = await ask(http, ANN, "one")
        other = await ask(http, BOB, "one")
        again = await ask(http, ANN, "one")
    assert "idempotency-replayed" not in first.headers
    assert "idempotency-replayed" not in other.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert len(engine.calls) == 2


async def ask(http: httpx.AsyncClient, key: str, idempotency_key: str) -> httpx.Response:
    headers = bearer(key) | {"Idempotency-Key": idempotency_key}
    return await http.post("/generate", json={"max_new_tokens": 1}, headers=headers)


async def test_only_the_keys_that_are_named_read_the_metrics_of_all(random_model: Path) -> None:
    engine = FakeEngine(continuous=True)
    async with client(random_model, engine, api_keys=PAIRS, metrics_keys="ann") as http:
        assert (await http.get("/metrics", headers=bearer(ANN))).status_code == 200
        refused = await http.get("/metrics", headers=bearer(BOB))
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "forbidden"


async def test_a_client_that_sends_a_thousand_replies_drives_out_its_own_alone(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replies.__init__, "__kwdefaults__", REPLIES | {"max_replies": 3})
    engine = FakeEngine(continuous=True)
    async with client(random_model, engine, api_keys=PAIRS) as http:
        await ask(http, ANN, "anns")
        for number in range(5):
            await ask(http, BOB, str(number))
        assert "idempotency-replayed" in (await ask(http, ANN, "anns")).headers
        assert "idempotency-replayed" not in (await ask(http, BOB, "0")).headers


async def test_there_are_no_websockets(random_model: Path) -> None:
    """Nobody checked a key of one, and uvicorn would log its headers."""
    sent: list[Message] = []
    app = create_app(
        load_settings({"ADAPTER_MODEL": str(random_model), "ADAPTER_USAGE_DB": ""}),
        start=service_with(FakeEngine(continuous=True)),
    )

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"type": "websocket", "path": "/generate", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close"}]


async def test_a_page_of_another_origin_may_call_only_where_it_is_allowed(
    random_model: Path,
) -> None:
    preflight = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST"}
    engine = FakeEngine(continuous=True)
    async with client(random_model, engine, api_keys=PAIRS) as http:
        response = await http.options("/generate", headers=preflight)
        assert "access-control-allow-origin" not in response.headers
    allowed = {"allowed_origins": "https://app.example.com"}
    async with client(random_model, engine, api_keys=PAIRS, **allowed) as http:
        response = await http.options("/generate", headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example.com"
        other = await http.options("/generate", headers=preflight | {"Origin": "https://evil.test"})
        assert "access-control-allow-origin" not in other.headers
