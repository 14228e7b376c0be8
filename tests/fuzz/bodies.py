"""Requests made wrong by hand: JSON texts, headers, forms and paths, and bytes that are no HTTP."""

import base64
import functools
import json
import random
from typing import Any

from tests.fuzz.songs import mutated, small_songs
from tests.fuzz.traffic import Request, json_request, upload_request

ROUTES = ("/generate", "/generate_batch", "/full_report")

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -0.0, -1, 1, 3, 0.5, 64.0, 2**31, 2**63 - 1, 2**63, -(2**63), 10**63),
    *(1e-320, 1e308, "", " ", "64", "true", "null", [], {}, [[]], [{}], {"": ""}, ["a"] * 4),
    *("\x00", "a\x00b", "\u202eabc\u202c", "\u200f", "e" + "\u0301" * 500, "\ufeff", "\uffff"),
    *("🎵" * 100, "\U0010ffff", "<sound>", "<|im_end|>", "</think>", "%s%n", "{{7*7}}", "\\", '"'),
    *("x" * 24_001, "data:audio/mpeg;base64,", "data:;base64,AAAA", "=", "====", "AA", "A" * 9999),
    *("../../etc/passwd", "file:///etc/passwd", "\r\nX: y", "http://", "http://[", "https://%00/"),
)
# As they stand in a text: no JSON value of Python's becomes them.
ODD_TOKENS = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e999", b"0x10", b"01", b"+1", b".5", b"1."),
    *(b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\ud83c\\udfb5"', b'"\xff\xfe"', b'"\xed\xa0\x80"'),
    *(
        b"'a'",
        b'"\\x"',
        b'"\n"',
        b'"\x00"',
        b"undefined",
        b"",
        b",",
        b"//",
        b"[" * 200,
        b"1" * 5000,
    ),
    *(b"[" * 60 + b"]" * 60, b"[" * 65 + b"]" * 65, b'{"a":' * 70 + b"1" + b"}" * 70),
)
URLS = (
    *("http://songs.invalid/a.mp3", "http://127.0.0.1/", "http://localhost:8000/health"),
    *("http://169.254.169.254/latest/meta-data/", "http://[::1]/", "http://[::ffff:127.0.0.1]/"),
    *("http://0x7f000001/", "http://2130706433/", "http://127.1/", "http://0/", "ftp://a.invalid/"),
    *("http://user:secret@songs.invalid/", "http://songs.invalid:22/", "http://songs.invalid./"),
    *(
        "http://a\\@songs.invalid/",
        "http://xn--zz/",
        "http://\uff53ongs.invalid/",
        "HTTP://songs.invalid",
    ),
    *(
        "http://songs.invalid/" + "a" * 9000,
        "http://songs.invalid/?" + "b=1&" * 4200,
        "//x",
        "http:",
    ),
)
CONTENT_TYPES = (
    *(b"", b"text/plain", b"application/xml", b"application/x-www-form-urlencoded", b"\xff\xfe"),
    *(b"application/json; charset=utf-16", b"application/json;;;", b"APPLICATION/JSON", b"json"),
    *(
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=a",
    ),
    *(b"multipart/mixed; boundary=a", b"application/json, text/plain", b"a" * 4000, b"/", b";"),
)
HEADERS = (
    *(
        (b"Idempotency-Key", value)
        for value in (b"", b"a", b"b", b"\xff", b"a" * 256, b"tab\there")
    ),
    *(
        (b"X-Request-Id", value)
        for value in (b"", b"mine", b"\xff", b"a" * 129, b"a b", b"a" * 5000)
    ),
    *((b"Content-Encoding", value) for value in (b"gzip", b"identity", b"br, gzip", b"\xff")),
    *(
        (b"Accept", value)
        for value in (b"", b"text/html", b"application/openmetrics-text", b"\xff;q")
    ),
    *((b"Authorization", b"Bearer \xff"), (b"Origin", b"null"), (b"Expect", b"100-continue")),
    *((b"Range", b"bytes=0-"), (b"X-Forwarded-For", b"a, b"), (b"Cookie", b"=" * 3000)),
)
PATHS = (
    *("/generate/", "/generate//", "/Generate", "/generate_batch/x", "/", "/health", "/live"),
    *(
        "/metrics",
        "/openapi.json",
        "/nothing",
        "/%00",
        "/%ff",
        "/..%2f..%2fetc%2fpasswd",
        "/docs/x",
    ),
    *("/generate?stream=true", "/" + "a" * 4000, "/health?%00=%ff", "/generate;a=b"),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW")


@functools.cache
def base64_song() -> str:
    return base64.b64encode(small_songs()["mp3"]).decode()


def valid_body(rng: random.Random, path: str) -> dict[str, Any]:
    stream = {"stream": True} if rng.random() < 0.2 else {}
    song = {"audio": base64_song()} if rng.random() < 0.3 else {}
    if path == "/generate":
        return _valid_prompt(rng) | stream
    if path == "/full_report":
        return {"sections": ["content_advisory"]} | song | stream
    prompts = [_valid_prompt(rng) for _ in range(rng.randint(1, 3))]
    return {"prompts": prompts} | song | stream


def _valid_prompt(rng: random.Random) -> dict[str, Any]:
    every = {
        "prompt": "Which key is it in?",
        "audio": base64_song(),
        "start_seconds": 0.1,
        "end_seconds": 0.4,
        "max_new_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "do_sample": True,
        "seed": 7,
        "repetition_penalty": 1.1,
    }
    return {name: value for name, value in every.items() if rng.random() < 0.4}


def odd_request(rng: random.Random, urls: tuple[str, ...] = URLS) -> Request:
    """A request with one or more things wrong, or none by luck."""
    kind = rng.random()
    if kind < 0.05:
        return Request(rng.choice(METHODS), rng.choice((*PATHS, *ROUTES)), _odd_headers(rng), b"")
    path = rng.choice(ROUTES)
    if kind < 0.15:
        return json_request(path, _with_url(rng, path, urls))
    if kind < 0.30:
        return _odd_form(rng, path)
    return _odd_json(rng, path)


def _with_url(rng: random.Random, path: str, urls: tuple[str, ...]) -> dict[str, Any]:
    prompt = {"audio_url": rng.choice(urls)}
    return prompt if path == "/generate" else {"prompts": [prompt, {"prompt": "a"}]}


def _odd_json(rng: random.Random, path: str) -> Request:
    body = valid_body(rng, path)
    for _ in range(rng.randint(0, 2)):
        _spoil_value(rng, body)
    content = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.5:
        content = _spoil_text(rng, content)
    content_type = b"application/json" if rng.random() < 0.9 else rng.choice(CONTENT_TYPES)
    headers = _odd_headers(rng) if rng.random() < 0.3 else ()
    return Request("POST", path, ((b"Content-Type", content_type), *headers), content)


def _odd_headers(rng: random.Random) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(rng.choice(HEADERS) for _ in range(rng.randint(0, 3)))


def _spoil_value(rng: random.Random, body: dict[str, Any]) -> None:
    """Set some field, of the body or of one of its prompts, to something odd."""
    place: dict[str, Any] = body
    prompts = body.get("prompts")
    if isinstance(prompts, list) and prompts and rng.random() < 0.7:
        place = rng.choice([prompt for prompt in prompts if isinstance(prompt, dict)] or [body])
    names = ["prompt", "audio", "audio_url", "start_seconds", "end_seconds", "max_new_tokens"]
    names += ["temperature", "top_p", "do_sample", "seed", "repetition_penalty", "group_size"]
    names += ["prompts", "sections", "stream", "top_k", "", "\x00", "__class__", "x" * 300]
    place[rng.choice(names)] = rng.choice(ODD_VALUES)


def _spoil_text(rng: random.Random, text: bytes) -> bytes:
    place = rng.randint(0, len(text))
    match rng.randrange(7):
        case 0:
            return text[:place]
        case 1:
            return text[:place] + rng.choice(ODD_TOKENS) + text[place:]
        case 2:
            return _swap_token(rng, text)
        case 3:  # a key twice
            return text[:-1] + (b"," if len(text) > 2 else b"") + text[1:]
        case 4:
            return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b" \n", b"\x00")) + text
        case 5:
            return text + rng.choice((b"{}", b",", b"\x00", b" " * 5000, text))
        case _:
            flipped = bytearray(text)
            for _ in range(rng.randint(1, 8) if text else 0):
                flipped[rng.randrange(len(text))] = rng.randrange(256)
            return bytes(flipped)


def _swap_token(rng: random.Random, text: bytes) -> bytes:
    """Another token in place of a field's value."""
    colons = [at for at, byte in enumerate(text) if byte == ord(":")]
    if not colons:
        return rng.choice(ODD_TOKENS)
    start = rng.choice(colons) + 1
    end = min(
        (at for at in (text.find(b",", start), text.find(b"}", start)) if at != -1), default=0
    )
    return text[:start] + rng.choice(ODD_TOKENS) + text[max(start, end) :]


def _odd_form(rng: random.Random, path: str) -> Request:
    body = valid_body(rng, path)
    song = small_songs()["opus"] if rng.random() < 0.5 else mutated(rng)
    form = upload_request(path, body, song)
    content = form.content
    if rng.random() < 0.7:
        head = content[:400]
        spoilt = _spoil_text(rng, head) if rng.random() < 0.5 else _spoil_form(rng, head)
        content = spoilt + content[400:]
    if rng.random() < 0.2:
        content = content[: rng.randint(0, len(content))]
    return Request("POST", path, form.headers, content)


def _spoil_form(rng: random.Random, head: bytes) -> bytes:
    old, new = rng.choice(
        (
            (b'name="request"', rng.choice((b'name="audio"', b"name=request", b'name=""', b""))),
            (b"form-data", rng.choice((b"attachment", b"form-data;" * 50, b"\xff"))),
            (b"\r\n\r\n", rng.choice((b"\n\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n"))),
            (b"Content-Type", rng.choice((b"X" * 9000, b"Content-Type\x00", b":", b""))),
            (b"--", rng.choice((b"preamble\r\n--", b"\r\n--", b"----", b""))),
        )
    )
    return head.replace(old, new, 1)


RAW_REQUESTS = (
    *(
        b"\x00" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"\r\n\r\n\r\n",
    ),
    *(b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nHost\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n"),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    *(
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + rest
        for rest in (
            b"Content-Length: -1\r\n\r\n{}",
            b"Content-Length: 99999999999999999999\r\n\r\n{}",
            b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
            b"Content-Length: 1000\r\n\r\n{}",
            b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}\r\n0\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n9\r\n{}\r\n0\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Trailer: a\r\n\r\n",
            b"Transfer-Encoding: gzip\r\n\r\n{}",
            b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
            b"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n{}",
            b"Connection: close\r\n\r\n",
        )
    ),
)
"""Bytes for a socket, after which the client sends no more."""


def odd_bytes(rng: random.Random) -> bytes:
    """One of the raw requests, or a good one with some of its bytes changed."""
    raw = rng.choice(RAW_REQUESTS)
    if rng.random() < 0.5:
        return raw
    changed = bytearray(raw[:2000])
    for _ in range(rng.randint(1, 6)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)
