"""Which URLs media may be fetched from: a short list of hosts, and never an inner address by accident."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from fleet_common.errors import InvalidInputError

DEFAULT_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")

#: One text for everything that is refused, so that nobody learns what exists inside.
NOT_ALLOWED = "media must be data: URLs or come from a host this server allows"


@dataclass(frozen=True, slots=True)
class FileKind:
    """What is expected at a URL.

    Attributes:
        name: `image`, `video`: part of error codes and messages.
    """

    name: str
    max_bytes: int

    def too_large(self, param: str) -> InvalidInputError:
        """What refuses a file above `max_bytes`."""
        return InvalidInputError(
            f"the {self.name} has more than {self.max_bytes} bytes", param=param, code=f"{self.name}_too_large"
        )


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """A URL that passed the rules.

    Attributes:
        target: path and query to ask for.
        allows_private: its host is listed together with this port, so an inner address is what the operator wants.
    """

    scheme: str
    host: str
    port: int
    target: str
    allows_private: bool


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """`host` alone: ports 80 and 443, public addresses; `host:port`: that port, any address."""

    host: str
    port: int | None


def parse_allowed_hosts(entries: Sequence[str]) -> tuple[AllowedHost, ...]:
    """Read `host`, `host:port`, `[v6]:port`. ValueError for anything else."""
    allowed = []
    for entry in entries:
        parts = urlsplit(f"//{entry}")
        if not parts.hostname or parts.path or parts.username is not None:
            raise ValueError(f"not a host or host:port: {entry!r}")
        allowed.append(AllowedHost(host=parts.hostname.rstrip(".").lower(), port=parts.port))
    return tuple(allowed)


def check_media_url(url: str, allowed: Sequence[AllowedHost], *, param: str) -> MediaUrl:
    """Scheme, host and port against the list; nothing is resolved or opened.

    Raises:
        InvalidInputError: `url_not_allowed`, the same text for every reason.
    """
    refused = InvalidInputError(NOT_ALLOWED, param=param, code="url_not_allowed")
    if _FORBIDDEN.search(url):
        raise refused
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise refused from error
    host = (parts.hostname or "").rstrip(".").lower()
    if parts.scheme not in DEFAULT_PORTS or not host or parts.username is not None or parts.password is not None:
        raise refused
    has_port = AllowedHost(host, port) in allowed
    if not has_port and not (AllowedHost(host, None) in allowed and port in DEFAULT_PORTS.values()):
        raise refused
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return MediaUrl(scheme=parts.scheme, host=host, port=port, target=target, allows_private=has_port)


def is_public_address(address: str) -> bool:
    """False for loopback, link-local, private, multicast and reserved addresses, also when wrapped in IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public_address(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved
