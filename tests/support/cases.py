"""Sending the failure cases of shared/cases through HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from fleet_cli.testing import RunningFleet

MODEL = "omnifleet-vlm"
IMAGE_PARAM = "messages[0].content[1].image_url"

#: A prompt with this word makes the scripted decoder of `case_fleet` fail after three tokens.
FAULT_WORD = " volcano"


@dataclass(frozen=True, slots=True)
class CaseClient:
    """A client of the case fleet, with the files at hand."""

    fleet: RunningFleet
    files: Path

    def url_of(self, name: str) -> str:
        """Data URL of a file of the cases."""
        return "data:image/png;base64," + base64.b64encode((self.files / name).read_bytes()).decode()

    def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        """One chat of one user message."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        return self.post(json.dumps(body).encode())

    def picture(self, url_or_name: str, **fields: Any) -> httpx.Response:
        """One chat with a picture, given as a data URL or as a file of the cases."""
        url = url_or_name if ":" in url_or_name else self.url_of(url_or_name)
        parts = [{"type": "text", "text": "colour?"}, {"type": "image_url", "image_url": {"url": url}}]
        return self.chat(parts, **{"max_tokens": 1, **fields})

    def post(
        self, body: bytes, path: str = "/v1/chat/completions", content_type: str = "application/json"
    ) -> httpx.Response:
        """Raw bytes."""
        headers = {"Content-Type": content_type}
        return httpx.post(f"{self.fleet.url}{path}", content=body, headers=headers, timeout=30)

    def seen(self, response: httpx.Response) -> Mapping[str, Any]:
        """What the encoder got of the only picture of an answered request, from its timeline."""
        assert response.status_code == 200, response.text
        report = httpx.get(f"{self.fleet.url}/v1/requests/{response.json()['id']}", timeout=10).json()
        (media,) = report["media"]
        return dict(media)

    def sha256(self, url_or_name: str) -> str:
        """Digest of the array the encoder got of a picture."""
        return str(self.seen(self.picture(url_or_name))["sha256"])


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a refused request: its status, and the envelope every client library knows."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert response.json().keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert not any(trace in error["message"] for trace in ("Traceback", "Error(", "/tmp/", ".py", "127.0.0.1"))
    return error


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON documents of a stream; each line is valid UTF-8 by itself."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    lines = [line.decode() for line in response.content.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def deltas_of(response: httpx.Response) -> list[str]:
    """The pieces of text of a stream."""
    return [
        choice["delta"].get("content") or "" for chunk in chunks_of(response) for choice in chunk.get("choices", ())
    ]
