"""The page's files as the server hands them out."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from adapter.api import create_app
from adapter.settings import load_settings

PAGE = Path(__file__).parents[1] / "adapter" / "page"


@pytest.fixture
def app(random_model: Path) -> FastAPI:
    """The whole application, its engine not started; it wants API keys."""
    variables = {"MODEL": str(random_model), "USAGE_DB": "", "API_KEYS": "team:a-long-secret-key-0"}
    return create_app(
        load_settings({f"ADAPTER_{name}": value for name, value in variables.items()})
    )


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "file", "content_type"),
    [
        ("/", "index.html", "text/html; charset=utf-8"),
        ("/static/app.js", "app.js", "text/javascript; charset=utf-8"),
        ("/static/style.css", "style.css", "text/css; charset=utf-8"),
        ("/static/icon.svg", "icon.svg", "image/svg+xml"),
        (
            "/static/vendor/wavesurfer.esm.js",
            "vendor/wavesurfer.esm.js",
            "text/javascript; charset=utf-8",
        ),
    ],
)
async def test_the_page_needs_no_key_and_has_its_types(
    http: httpx.AsyncClient, path: str, file: str, content_type: str
) -> None:
    response = await http.get(path)
    assert response.status_code == 200
    assert response.content == (PAGE / file).read_bytes()
    assert response.headers["content-type"] == content_type


async def test_below_a_prefix_it_needs_no_key_either(app: FastAPI) -> None:
    transport = httpx.ASGITransport(app, root_path="/x")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/x/")).status_code == 200
        assert (await http.get("/x/static/app.js")).status_code == 200


@pytest.mark.parametrize("path", ["/", "/static/app.js"])
async def test_its_policy_allows_nothing_inline_and_nothing_foreign(
    http: httpx.AsyncClient, path: str
) -> None:
    headers = (await http.get(path)).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert not any("unsafe" in sources or "http" in sources for sources in policy.values())
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


async def test_a_file_that_did_not_change_is_not_sent_again(http: httpx.AsyncClient) -> None:
    first = await http.get("/static/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await http.get("/static/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (await http.get("/static/app.js", headers={"If-None-Match": '"x"'})).status_code == 200


@pytest.mark.parametrize("path", ["/", "/static/style.css"])
async def test_head_is_answered(http: httpx.AsyncClient, path: str) -> None:
    response = await http.head(path)
    assert response.status_code == 200
    assert int(response.headers["content-length"]) > 0


@pytest.mark.parametrize(
    "path",
    [
        "/static/nothing.js",
        "/static/",
        "/static/vendor",
        "/static/index.html",
        "/static/%2e%2e/api.py",
        "/static/..%2fapi.py",
        "/static//etc/passwd",
    ],
)
async def test_what_is_no_file_of_the_page_is_not_found(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


async def test_it_takes_no_post(http: httpx.AsyncClient) -> None:
    response = await http.post("/static/app.js")
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, HEAD"
    assert response.json()["error"]["code"] == "method_not_allowed"


async def test_it_is_not_in_the_openapi_document(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert not any(path == "/" or path.startswith("/static") for path in paths)


def test_every_address_in_the_page_is_relative() -> None:
    html = (PAGE / "index.html").read_text()
    for attribute in ("src", "href"):
        found = [part.split('"')[0] for part in html.split(f'{attribute}="')[1:]]
        assert found and not any(address.startswith(("/", "http")) for address in found)
