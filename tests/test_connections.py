"""Connections that ask nothing: they end, and in thousands they keep nobody from an answer."""

import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.server import Server
from tests.test_server_signals import fake_server

HEAD_SECONDS = 3.0
READ_SECONDS = 3.0
BODY_HEAD = (
    b"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    b"Content-Length: 1000\r\n\r\n"
)


@pytest.fixture(scope="module")
def server(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("connections") / "log"
    settings = {
        "FAKE_HEAD_SECONDS": str(HEAD_SECONDS),
        "FAKE_READ_SECONDS": str(READ_SECONDS),
        "ADAPTER_BODY_TIMEOUT_SECONDS": "3",
    }
    with fake_server(random_model, log, **settings) as running:
        yield running


def connect(server: Server, receive_bytes: int | None = None) -> socket.socket:
    url = httpx.URL(server.url)
    assert url.port is not None
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(60)
    connection.connect((url.host, url.port))
    return connection


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize(
    "text",
    [
        b"hello\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
)
def test_what_is_no_http_gets_the_one_form_of_error(server: Server, text: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(text)
        if not text.endswith(b"\n"):
            connection.shutdown(socket.SHUT_WR)
        head, _, body = everything(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_a_head_without_an_end_is_cut_off(server: Server) -> None:
    with connect(server) as connection, pytest.raises(OSError):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nA: ")
        for _ in range(100):  # MiB
            connection.sendall(b"a" * 2**20)


def test_a_connection_that_asks_nothing_ends_and_one_between_requests_too(server: Server) -> None:
    started = time.monotonic()
    with ExitStack() as stack:
        silent, half, second = (stack.enter_context(connect(server)) for _ in range(3))
        half.sendall(b"GET /live HTTP/1.1\r\nHost: te")
        second.sendall(b"GET /live HTTP/1.1\r\nHost: test\r\n\r\nGET /live HT")
        assert everything(silent) == b""
        assert everything(half) == b""
        assert everything(second).count(b"HTTP/1.1 200 OK") == 1
    assert HEAD_SECONDS - 1 < time.monotonic() - started < HEAD_SECONDS + 5


def test_a_client_that_reads_nothing_does_not_hold_its_connection(server: Server) -> None:
    with ExitStack() as stack:
        deaf = stack.enter_context(connect(server, receive_bytes=4096))
        deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: test\r\n\r\n" * 1500)
        time.sleep(READ_SECONDS + 2)
        assert server.get("/live").status_code == 200
        with pytest.raises(OSError):
            for _ in range(100):
                deaf.sendall(b"GET /live HTTP/1.1\r\nHost: test\r\n\r\n")
                time.sleep(0.05)


def test_a_body_in_chunks_of_one_byte_holds_nobody_up(server: Server) -> None:
    stop = threading.Event()

    def send_chunks() -> None:
        head = b"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        with connect(server) as connection:
            try:
                connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
                while not stop.is_set():
                    connection.sendall(b"1\r\nx\r\n" * 10_000)
                    time.sleep(0.05)  # 1.1 MiB/s
            except OSError:
                pass

    senders = [threading.Thread(target=send_chunks) for _ in range(2)]
    for sender in senders:
        sender.start()
    seconds = []
    for _ in range(20):
        started = time.monotonic()
        assert server.get("/live").status_code == 200
        seconds.append(time.monotonic() - started)
    stop.set()
    for sender in senders:
        sender.join()
    print(f"\n/live beside chunks of one byte: at most {max(seconds):.3f} s")
    assert sorted(seconds)[10] < 0.2


def test_a_letter_now_and_then_is_no_request_either(server: Server) -> None:
    ended = threading.Event()
    with connect(server) as connection:

        def drip() -> None:
            for letter in "GET /live HTTP/1.1\r\nX: " + "a" * 1000:
                if ended.wait(0.5):
                    return
                try:
                    connection.sendall(letter.encode())
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        started = time.monotonic()
        assert everything(connection) == b""
        assert time.monotonic() - started < HEAD_SECONDS + 5
        ended.set()
        dripping.join()


def test_a_body_that_stops_is_answered_with_408_and_the_connection_closed(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(BODY_HEAD + b'{"prompt": "')
        head, _, body = everything(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "request_timeout"


def test_beside_thousands_of_connections_health_and_prompts_are_answered(server: Server) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(3000)]
        for connection in idle[:1000]:
            connection.sendall(b"GET /live HT")
        for connection in idle[1000:1500]:
            connection.sendall(BODY_HEAD)
        seconds = []
        for _ in range(20):
            started = time.monotonic()
            assert server.get("/health").status_code == 200
            seconds.append(time.monotonic() - started)
        assert server.post("/generate", {"max_new_tokens": 1}).status_code == 200
    print(f"\n/health beside 3000 connections: at most {max(seconds):.3f} s")
    assert sorted(seconds)[10] < 0.2


def test_behind_a_proxy_that_strips_a_prefix_the_page_finds_its_document(
    random_model: Path, tmp_path: Path
) -> None:
    command = ("--root-path", "/music")
    with fake_server(random_model, tmp_path / "log", *command, ADAPTER_API_KEYS="a:b") as running:
        assert "/music/openapi.json" in running.get("/docs").text
        assert running.get("/openapi.json").json()["servers"] == [{"url": "/music"}]
        assert running.get("/health").status_code == 200
        assert running.post("/generate", {}).status_code == 401
