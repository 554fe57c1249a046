"""Pictures behind a URL: files in the broker's object store for a while, which every ingress reads."""

from __future__ import annotations

import math
import re
import secrets

from litestar.types import HTTPScope

from fleet_common.bus.port import Bus, ObjectStore
from fleet_common.clock import Clock
from fleet_common.errors import AdmissionRejectedError, QueueFullError
from fleet_contracts import subjects
from fleet_ingress.core.image_answers import KeptPicture
from fleet_ingress.core.owners import owner_token
from fleet_ingress.routes.http import header
from fleet_ingress.settings import IngressSettings

#: Path of the files; after it comes a name.
FILES_PATH = "/v1/images/files/"

#: 256 random bits: who knows a name was given it.
_KEY_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{64}\.(png|jpeg|webp)")
_HOST = re.compile(r"[A-Za-z0-9.\-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")

#: Owner of pictures that need no key.
_ANYBODY = "anybody"


class PictureLinks:
    """Keeps files and finds them again."""

    def __init__(self, bus: Bus, clock: Clock, settings: IngressSettings) -> None:
        self._bus = bus
        self._clock = clock
        self._settings = settings
        self._objects: ObjectStore

    async def open(self) -> None:
        """Find the bucket. Raises BusError when `fleet bus apply` did not make it."""
        self._objects = await self._bus.objects(subjects.OBJECTS_PICTURES)

    async def keep(self, tenant: str, file: bytes, file_format: str, base_url: str) -> KeptPicture:
        """Keep a file. Raises BusError, AdmissionRejectedError (no room)."""
        name = f"{secrets.token_hex(_KEY_BYTES)}.{file_format}"
        ttl_s = self._settings.image_url_ttl_s
        expires_unix_s = math.floor(self._clock.unix_s() + ttl_s)
        try:
            await self._objects.put(self._object_name(tenant, name), file, ttl_s)
        except QueueFullError as err:
            raise AdmissionRejectedError(
                "There is no room for pictures behind URLs; ask for `b64_json`.", retry_after_s=60.0
            ) from err
        return KeptPicture(url=f"{base_url}{FILES_PATH}{name}", expires_unix_s=expires_unix_s)

    async def find(self, tenant: str, name: str) -> tuple[bytes, str] | None:
        """A tenant's file and its media type; None when there is none, or no longer. Raises BusError."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        file = await self._objects.get(self._object_name(tenant, name))
        return None if file is None else (file, f"image/{match[1]}")

    def _object_name(self, tenant: str, name: str) -> str:
        owner = _ANYBODY if self._settings.is_image_url_public else owner_token(tenant)
        return f"{owner}.{name}"


def is_picture_path(path: str) -> bool:
    """Whether a path is that of some file of a picture, in its one spelling."""
    return path.startswith(FILES_PATH) and _NAME.fullmatch(path.removeprefix(FILES_PATH)) is not None


def base_url(scope: HTTPScope, settings: IngressSettings) -> str:
    """Where the client finds this fleet: as the operator says, else as it found it just now."""
    if settings.public_url:
        return settings.public_url.rstrip("/")
    host = header(scope, b"host") or ""
    if _HOST.fullmatch(host):
        return f"{scope['scheme']}://{host}"
    own = settings.http_host
    return f"http://{f'[{own}]' if ':' in own else own}:{settings.http_port}"
