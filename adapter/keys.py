"""API keys: who sends a request, and whose songs it may find in the caches.

Keys are held as SHA-256 digests. Each name has a secret of this process, which names its songs and
salts its prefixes.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from adapter.errors import UnauthorizedError
from adapter.logs import current_request

CacheScope = Literal["key", "all", "request"]

OPEN_PATHS = frozenset({"/", "/live", "/health", "/docs", "/openapi.json"})
OPEN_FOLDER = "/static/"

_BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Client:
    """Who sends a request: the name of its key, None where there are no keys.

    What `cache_key` names in the caches is found by nobody with another one; None is everybody's.
    """

    name: str | None = None
    cache_key: bytes | None = None

    @property
    def cache_salt(self) -> str | None:
        """What vLLM's prefix cache is salted with."""
        if self.cache_key is None:
            return None
        return hmac.digest(self.cache_key, b"prefix", "sha256").hex()


class Keys:
    """The configured keys, by their digests; without any, everybody is welcome and has no name."""

    def __init__(self, names: Mapping[bytes, str], *, cache_scope: CacheScope = "key") -> None:
        self._names = names
        self._cache_scope = cache_scope
        self._cache_keys = {name: _new_cache_key() for name in names.values()}

    def client(self, authorization: Sequence[str]) -> Client:
        """Who sent these values of the header `Authorization`. Raises UnauthorizedError."""
        name = self._name(authorization) if self._names else None
        return Client(name, self._cache_key(name))

    def _name(self, authorization: Sequence[str]) -> str:
        match = _BEARER.fullmatch(authorization[0]) if len(authorization) == 1 else None
        if match is None:
            raise UnauthorizedError("send your API key in one header: Authorization: Bearer KEY")
        sent = key_digest(match[1])
        # Every key is compared, each in constant time.
        found = [name for digest, name in self._names.items() if hmac.compare_digest(digest, sent)]
        if not found:
            raise UnauthorizedError("this API key is not known here; check it, or ask for one")
        return found[0]

    def _cache_key(self, name: str | None) -> bytes | None:
        if self._cache_scope == "request":
            return _new_cache_key()
        return None if self._cache_scope == "all" else self._cache_keys.get(name or "")


def _new_cache_key() -> bytes:
    return secrets.token_bytes(32)


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyCheck:
    """The layer that lets nobody pass without a key, but to what is open to all; whoever passes
    is `request.state.client`. `refuse` makes the response to the others."""

    def __init__(
        self, app: ASGIApp, *, keys: Keys, refuse: Callable[[UnauthorizedError], Response]
    ) -> None:
        self._app = app
        self._keys = keys
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # there is none here
            return
        if scope["type"] != "http" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        try:
            client = self._keys.client(Headers(scope=scope).getlist("authorization"))
        except UnauthorizedError as error:
            await self._refuse(error)(scope, receive, send)
            return
        record = current_request()
        if record is not None:
            record.key_name = client.name
        scope.setdefault("state", {})["client"] = client
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
