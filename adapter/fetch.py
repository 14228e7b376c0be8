"""Fetches a song from a URL that a stranger chose, and nothing that it should not.

One parser (yarl) makes the URL that is checked and the URL that is requested. A host name is looked
up once per hop; all of its addresses must be public, and the connection goes to one of those.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
import re
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Any, BinaryIO

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from adapter.decoder import EncodedSong
from adapter.errors import (
    AudioUnavailableError,
    TooLargeError,
    UnavailableError,
    UnprocessableError,
)

MAX_REDIRECTS = 3
LOOK_UP_SECONDS = 20.0
MAX_THREADS = 512
MAX_URL_CHARACTERS = 8_192

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # (host, port) to addresses

_CHUNK_BYTES = 1 << 16
_REDIRECTS = {301, 302, 303, 307, 308}
_DEFAULT_PORTS = {80, 443}
# White space, control characters and backslashes: parsers disagree about them.
_ODD_CHARACTERS = re.compile(r"[\s\x00-\x20\x7f-\xa0\\]")
# What inet_aton(3) takes for an address: 127.1, 0x7f000001, 017700000001, 2130706433.
_NUMERIC_LABEL = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)
_IDENTITY = {"", "identity"}

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# Global by the registries and yet no place for a song: `ipaddress.is_global` differs between
# Python's patch releases, and knows no cloud's metadata service.
_REFUSED: tuple[_Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's wire server
        "192.0.0.0/24",  # IETF protocol assignments; 192.0.0.192 is Oracle's metadata service
        "192.88.99.0/24",  # 6to4 relays
        "2001::/23",  # IETF protocol assignments, Teredo among them
        "2002::/16",  # 6to4: an IPv4 address inside
        "3fff::/20",  # documentation
    )
)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_DEVELOPMENT: tuple[_Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
)


async def fetch(
    url: str,
    *,
    max_bytes: int,
    timeout_seconds: float,
    allowed_hosts: Sequence[str] = (),
    allow_private: bool = False,
    resolve: Resolve | None = None,
) -> EncodedSong:
    """Fetch a file over http or https into an unnamed temporary file, hashed as it arrives.

    `allowed_hosts`, where there are any, names the only hosts that may be asked: `host`,
    `*.domain` for what is below a domain, `host:port` for a port besides 80 and 443.
    `allow_private` is for development: any port, loopback and RFC 1918 addresses too. `resolve`
    looks names up in place of the system. `timeout_seconds` is for all of it, redirects included.

    Raises UnprocessableError (`url_not_allowed`), TooLargeError, and AudioUnavailableError, none of
    which repeats the URL's path or query, or anything that was received.
    """
    policy = Policy(allowed_hosts, allow_private)
    first = policy.parse(url)
    try:
        async with asyncio.timeout(timeout_seconds), open_session(policy, resolve) as session:
            with contextlib.ExitStack() as unfinished:
                file = unfinished.enter_context(tempfile.TemporaryFile())
                song = await follow(session, first, policy, file, max_bytes)
                unfinished.pop_all()
                return song
    except TimeoutError:
        raise AudioUnavailableError(
            f"The audio URL did not send its file within {timeout_seconds:g} seconds."
        ) from None
    except OSError as error:
        raise UnavailableError("There is no room for the file just now; try again.") from error


class Policy:
    """What may be asked for audio."""

    def __init__(self, allowed_hosts: Sequence[str], allow_private: bool) -> None:
        self._allowed_hosts = [pattern.lower() for pattern in allowed_hosts]
        self._allow_private = allow_private

    def parse(self, text: str, base: URL | None = None) -> URL:
        """Parse and check a URL, or a redirect's target relative to `base`."""
        if len(text) > MAX_URL_CHARACTERS:
            raise not_allowed(f"is longer than {MAX_URL_CHARACTERS} characters")
        if _ODD_CHARACTERS.search(text):
            raise not_allowed("holds white space, a control character or a backslash")
        try:
            # ASCII is sent as it was written, since a signed URL may not survive requoting.
            url = URL(text, encoded=text.isascii())
            url = url if base is None else base.join(url)
            port = url.port
        except ValueError:
            raise not_allowed("cannot be read as a URL") from None
        self._check(url, port)
        return url

    def check_address(self, address: str) -> None:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if is_public(parsed) or (self._allow_private and within(parsed, _DEVELOPMENT)):
            return
        raise not_allowed("leads to an address that is not public")

    def _check(self, url: URL, port: int | None) -> None:
        host = url.raw_host
        if url.scheme not in ("http", "https"):
            raise not_allowed("does not begin with http:// or https://")
        if not host or not port:
            raise not_allowed("names no host")
        if url.raw_user is not None or url.raw_password is not None:
            raise not_allowed("holds a user name or password")
        self._check_host(host)
        self._check_port(host, port)

    def _check_host(self, host: str) -> None:
        if "%" in host or not host.isascii():
            raise not_allowed("has a host name that cannot be looked up")
        if host.endswith("."):
            raise not_allowed("has a host that ends in a dot")
        if is_address(host):
            self.check_address(host)
        elif _NUMERIC_LABEL.fullmatch(host.rpartition(".")[2]):
            raise not_allowed("writes an IP address in an unusual way")

    def _check_port(self, host: str, port: int) -> None:
        if self._allowed_hosts:
            if not any(matches(pattern, host.lower(), port) for pattern in self._allowed_hosts):
                raise not_allowed("is at a host that this server does not fetch from")
        elif port not in _DEFAULT_PORTS and not self._allow_private:
            raise not_allowed("has a port other than 80 and 443")


def matches(pattern: str, host: str, port: int) -> bool:
    """Whether a host is the one of `host`, `*.domain` or either with `:port`."""
    name, _, allowed_port = pattern.partition(":") if pattern.count(":") == 1 else (pattern, "", "")
    if str(port) != allowed_port and (allowed_port or port not in _DEFAULT_PORTS):
        return False
    if name.startswith("*."):
        return host.endswith(name[1:])
    return host == name


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is a public unicast one, also where IPv4 is wrapped in IPv6."""
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return is_public(IPv4Address(address.packed[-4:]))
        if address not in _GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast and not within(address, _REFUSED)


def within(address: IPv4Address | IPv6Address, networks: Sequence[_Network]) -> bool:
    return any(address in network for network in networks)


class CheckedResolver(AbstractResolver):
    """Gives aiohttp the addresses of a host, once all of them were found allowed."""

    def __init__(self, policy: Policy, resolve: Resolve) -> None:
        self._policy = policy
        self._resolve = resolve

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002 - all of them are tried
    ) -> list[ResolveResult]:
        addresses = await self._resolve(host, port)
        for address in addresses:
            self._policy.check_address(address)
        return [self._result(host, address, port) for address in addresses]

    async def close(self) -> None:
        pass

    def _result(self, host: str, address: str, port: int) -> ResolveResult:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return ResolveResult(
            hostname=host, host=address, port=port, family=family, proto=0, flags=flags
        )


async def look_up(host: str, port: int) -> Sequence[str]:
    """The system's look-up, in a thread of its own: one for a name whose servers never answer takes
    a minute that nobody can cut short, and must not keep others' waiting."""
    if threading.active_count() > MAX_THREADS:
        raise OSError("too many look-ups that get no answer")
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[Any]] = loop.create_future()
    threading.Thread(target=_look_up, args=(host, port, loop, found), daemon=True).start()
    async with asyncio.timeout(LOOK_UP_SECONDS):
        return list(dict.fromkeys(str(address[0]) for *_, address in await found))


def _look_up(
    host: str, port: int, loop: asyncio.AbstractEventLoop, found: "asyncio.Future[list[Any]]"
) -> None:
    """Bytes keep Python from applying its IDNA to what is ASCII by now."""
    result: list[Any] | OSError
    try:
        result = socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        result = error
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_settle, found, result)


def _settle(found: "asyncio.Future[list[Any]]", result: list[Any] | OSError) -> None:
    if found.done():  # whoever asked has left
        return
    if isinstance(result, OSError):
        found.set_exception(result)
    else:
        found.set_result(result)


def open_session(policy: Policy, resolve: Resolve | None) -> aiohttp.ClientSession:
    """A session of one fetch: no cookies, no proxy or .netrc of the environment, no decoding."""
    connector = aiohttp.TCPConnector(
        resolver=CheckedResolver(policy, resolve or look_up), use_dns_cache=False
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30),
        headers={"Accept-Encoding": "identity", "User-Agent": "music-flamingo-adapter"},
    )


async def follow(
    session: aiohttp.ClientSession, url: URL, policy: Policy, file: BinaryIO, max_bytes: int
) -> EncodedSong:
    try:
        for _ in range(MAX_REDIRECTS + 1):
            async with session.get(url, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await receive(response, file, max_bytes)
                url = policy.parse(response.headers.get("Location", ""), base=url)
    except aiohttp.ClientError as error:
        # The original's text holds the URL, so only its kind is told.
        raise AudioUnavailableError(
            f"The audio URL did not answer with the file ({type(error).__name__}); check that it"
            " can be reached from this server."
        ) from None
    raise AudioUnavailableError(f"The audio URL redirects more than {MAX_REDIRECTS} times.")


async def receive(response: aiohttp.ClientResponse, file: BinaryIO, max_bytes: int) -> EncodedSong:
    if response.status != 200:
        raise AudioUnavailableError(
            f"The audio URL answered with status {response.status}, not with the file."
        )
    if response.headers.get("Content-Encoding", "").lower() not in _IDENTITY:
        raise AudioUnavailableError(
            "The audio URL answered with a compressed body, which was not asked for."
        )
    if (response.content_length or 0) > max_bytes:
        raise too_large(max_bytes)
    digest = hashlib.sha256()
    num_bytes = 0
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        digest.update(chunk)
        file.write(chunk)
    return EncodedSong(file, num_bytes, digest.hexdigest())


def not_allowed(reason: str) -> UnprocessableError:
    return UnprocessableError(
        f"The audio URL {reason}; send a public http or https URL of the file, or the file itself.",
        code="url_not_allowed",
    )


def too_large(max_bytes: int) -> TooLargeError:
    return TooLargeError(
        f"The file at the audio URL is larger than the {max_bytes} bytes that are allowed."
    )
