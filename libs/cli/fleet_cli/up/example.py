"""The first requests a person can try: what `fleet up` prints once it is ready."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path

_SIZE = 64
_BACKGROUND = (0, 0, 255)
_SHAPE = (255, 0, 0)


def red_circle_png() -> bytes:
    """A red circle on a blue background, 64 x 64."""
    centre, radius = (_SIZE - 1) / 2, _SIZE * 0.3

    def pixel(x: int, y: int) -> tuple[int, int, int]:
        return _SHAPE if (x - centre) ** 2 + (y - centre) ** 2 <= radius**2 else _BACKGROUND

    rows = b"".join(b"\0" + bytes(v for x in range(_SIZE) for v in pixel(x, y)) for y in range(_SIZE))
    header = struct.pack(">IIBBBBB", _SIZE, _SIZE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def picture_body(model: str) -> str:
    """A chat completion that asks about the picture, as JSON."""
    picture = base64.b64encode(red_circle_png()).decode()
    content = [
        {"type": "text", "text": "Describe the picture."},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    ]
    return _body(model, content)


def text_body(model: str) -> str:
    """A chat completion that asks a question, as JSON."""
    return _body(model, "What is the capital of France?")


def _body(model: str, content: object) -> str:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": model, "messages": messages, "max_tokens": 32, "temperature": 0})


def curl_lines(url: str, model: str, picture_file: Path | None) -> list[str]:
    """Command lines to paste; the second sends a picture from a file."""
    head = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'"
    lines = [f"{head} -d '{text_body(model)}'"]
    if picture_file is not None:
        lines.append(f"{head} -d @{picture_file}")
    return lines


def drawing_lines(url: str, drawing: str) -> list[str]:
    """A command line that writes a picture, and one that changes it; none without a model that draws."""
    if not drawing:
        return []
    form = f"-F model={drawing} -F image=@star.png -F prompt='a red circle on a yellow background'"
    save = '| sed \'s/.*"b64_json":"\\([^"]*\\)".*/\\1/\' | base64 -d >'
    body = json.dumps({"model": drawing, "prompt": "a green star on a yellow background", "seed": 1})
    return [
        f"curl {url}/v1/images/generations -H 'Content-Type: application/json' -d '{body}' {save} star.png",
        f"curl {url}/v1/images/edits {form} {save} circle.png",
    ]


def audio_lines(url: str, hearing: str, speaking: str) -> list[str]:
    """Command lines that have a text read aloud, and written down again; "" for a model that is not served."""
    lines = []
    if speaking:
        body = json.dumps({"model": speaking, "input": "What is the capital of France?", "response_format": "wav"})
        lines.append(f"curl {url}/v1/audio/speech -H 'Content-Type: application/json' -d '{body}' -o hello.wav")
    if hearing:
        lines.append(f"curl {url}/v1/audio/transcriptions -F model={hearing} -F file=@hello.wav")
    return lines
