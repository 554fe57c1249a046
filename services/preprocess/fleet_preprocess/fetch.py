"""Fetches media from allowed hosts: addresses pinned, every redirect checked again, bytes and time capped."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urljoin

import httpx

from fleet_common.errors import InvalidInputError
from fleet_preprocess.core.media_url import (
    DEFAULT_PORTS,
    NOT_ALLOWED,
    AllowedHost,
    FileKind,
    MediaUrl,
    check_media_url,
    is_public_address,
)

#: (host, port) -> addresses; OSError when the name does not resolve.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Caps of one fetch; `total_s` covers all hops together."""

    total_s: float = 10.0
    max_redirects: int = 3


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is fetched, and for which part of the request."""

    kind: FileKind
    param: str

    def failed(self, url: MediaUrl, why: str) -> InvalidInputError:
        message, code = f"fetching media from {url.host}: {why}", f"{self.kind.name}_fetch_failed"
        return InvalidInputError(message, param=self.param, code=code)


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Addresses by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class MediaFetcher:
    """One GET at a time, without cookies, proxies, compression or kept connections.

    The transport is used directly: a client would keep cookies and connections by address, across hosts.
    """

    def __init__(
        self,
        allowed: Sequence[AllowedHost],
        limits: FetchLimits,
        *,
        transport: httpx.AsyncBaseTransport,
        resolve: Resolve = resolve_host,
    ) -> None:
        self._allowed = tuple(allowed)
        self._limits = limits
        self._transport = transport
        self._resolve = resolve

    async def fetch(self, url: str, kind: FileKind, *, param: str) -> bytes:
        """Bytes behind a URL.

        Raises:
            InvalidInputError: `url_not_allowed`, `image_fetch_failed` (message: host, and status or `timeout`; never
                what the host sent), `image_too_large`; the last two by the name of the kind.
        """
        checked = check_media_url(url, self._allowed, param=param)
        wanted = _Wanted(kind, param)
        try:
            async with asyncio.timeout(self._limits.total_s):
                return await self._follow(url, checked, wanted)
        except TimeoutError as error:
            raise wanted.failed(checked, "timeout") from error
        except httpx.InvalidURL as error:
            raise InvalidInputError(NOT_ALLOWED, param=param, code="url_not_allowed") from error
        except httpx.HTTPError as error:
            raise wanted.failed(checked, "connection failed or ended early") from error

    async def close(self) -> None:
        """Close open connections."""
        await self._transport.aclose()

    async def _follow(self, url: str, checked: MediaUrl, wanted: _Wanted) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            response = await self._request(checked, await self._pinned_address(checked, wanted), wanted.kind)
            try:
                location = response.headers.get("location")
                if response.status_code not in _REDIRECTS or location is None:
                    return await self._read(response, checked, wanted)
            finally:
                await response.aclose()
            url = urljoin(url, location)
            checked = check_media_url(url, self._allowed, param=wanted.param)
        raise wanted.failed(checked, f"more than {self._limits.max_redirects} redirects")

    async def _pinned_address(self, url: MediaUrl, wanted: _Wanted) -> str:
        """The one address this hop connects to: a second lookup could answer differently."""
        try:
            addresses = await self._resolve(url.host, url.port)
        except OSError as error:
            raise wanted.failed(url, "the name does not resolve") from error
        if not addresses:
            raise wanted.failed(url, "the name does not resolve")
        if not url.allows_private and not all(is_public_address(address) for address in addresses):
            raise InvalidInputError(NOT_ALLOWED, param=wanted.param, code="url_not_allowed")
        return addresses[0]

    async def _request(self, url: MediaUrl, address: str, kind: FileKind) -> httpx.Response:
        netloc = f"[{address}]" if ":" in address else address
        host = f"[{url.host}]" if ":" in url.host else url.host
        if url.port != DEFAULT_PORTS[url.scheme]:
            host = f"{host}:{url.port}"
        request = httpx.Request(
            "GET",
            f"{url.scheme}://{netloc}:{url.port}{url.target}",
            headers={"Host": host, "Accept": f"{kind.name}/*", "Accept-Encoding": "identity"},
            extensions={"sni_hostname": url.host},
        )
        response = await self._transport.handle_async_request(request)
        response.request = request
        return response

    async def _read(self, response: httpx.Response, url: MediaUrl, wanted: _Wanted) -> bytes:
        if response.status_code != 200:
            raise wanted.failed(url, f"status {response.status_code}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise wanted.failed(url, "compressed answer")
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > wanted.kind.max_bytes:
                raise wanted.kind.too_large(wanted.param)
        return bytes(body)
