"""`fleet tap`: messages as they pass, decoded by a library that knows nothing of our structs."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from fleet_cli.connect import Target
from fleet_common.bus.nats import connect_bus
from fleet_common.bus.port import BusMessage

#: Publishes to a JetStream subject are core messages too: a core subscription sees each once, redeliveries not.
SUBJECTS = ("fleet.work.>", "fleet.event.>", "fleet.cancel", "fleet.dead.>", "fleet.telemetry.>", "fleet.ask.>")

_MAX_TEXT = 60


@dataclass(frozen=True, slots=True)
class Filter:
    """Which messages to show; empty: all but telemetry."""

    stage: str = ""
    request: str = ""
    has_telemetry: bool = False

    def admits(self, subject: str, message: Any) -> bool:
        """Whether a decoded message is one of those asked for."""
        if subject.startswith("fleet.telemetry.") and not self.has_telemetry:
            return False
        if self.stage and self.stage not in (*subject.split("."), _attempt(message).get("stage")):
            return False
        return not self.request or self.request in (request_of(message), *subject.split("."))


def decode(payload: bytes) -> Any:
    """A message as plain dicts and lists; None for bytes that are no MessagePack."""
    try:
        return msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, msgpack.exceptions.UnpackException):
        return None


def request_of(message: Any) -> str:
    """The request a message belongs to, "" for none."""
    if not isinstance(message, dict):
        return ""
    return str(message.get("request_id") or _attempt(message).get("request_id") or "")


def _attempt(message: Any) -> dict[str, Any]:
    attempt = message.get("attempt") if isinstance(message, dict) else None
    return attempt if isinstance(attempt, dict) else {}


def json_line(subject: str, message: Any, seen_unix_s: float) -> str:
    """One message as one line of JSON; bytes become their length."""
    return json.dumps({"seen_unix_s": round(seen_unix_s, 6), "subject": subject, "message": message}, default=_plain)


def _plain(value: Any) -> Any:
    return {"nbytes": len(value)} if isinstance(value, bytes) else str(value)


def text_line(subject: str, message: Any, seen_unix_s: float) -> str:
    """One message as one line for people."""
    clock = time.strftime("%H:%M:%S", time.localtime(seen_unix_s)) + f".{int(seen_unix_s * 1000) % 1000:03d}"
    if not isinstance(message, dict):
        return f"{clock} {subject} (undecodable)"
    attempt = _attempt(message)
    facts = [str(message.get("type", "?")).removesuffix(".v1"), request_of(message)[-8:]]
    if "step_id" in message:
        facts.append(f"{message['step_id']} epoch {message.get('epoch', 0)} {message.get('model', '')}")
    if attempt:
        facts.append(
            f"{attempt.get('step_id')} by {attempt.get('worker_id')} epoch {attempt.get('epoch')}"
            f" delivery {attempt.get('delivery')} seq {message.get('seq', '-')}"
        )
    if message.get("text"):
        facts.append(repr(message["text"])[:_MAX_TEXT])
    if message.get("failure"):
        facts.append(f"{message['failure'].get('code')}: {message['failure'].get('message')}")
    if "in_flight" in message or str(message.get("type", "")).startswith("telemetry"):
        facts.append(f"in flight {message.get('in_flight', 0)} service {message.get('service_s', 0.0):.3f} s")
    return f"{clock} {_short(subject):<40} {'  '.join(fact for fact in facts if fact)}"


def _short(subject: str) -> str:
    """Subject without what the rest of the line says better."""
    tokens = subject.split(".")
    return ".".join(tokens[1:3] if tokens[1] == "event" else tokens[1:])


async def tap(target: Target, wanted: Filter, write: Callable[[str, Any, float], None]) -> None:
    """Hand every admitted message to `write(subject, message, seen_unix_s)` until Ctrl-C. Raises BusError."""
    bus = await connect_bus(target.bus, "fleet tap")
    is_over = asyncio.Event()
    # Asked for by name: a shell starts what it puts into the background with the interrupt ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, is_over.set)

    async def show(message: BusMessage) -> None:
        decoded = decode(message.payload)
        if wanted.admits(message.subject, decoded):
            write(message.subject, decoded, time.time())

    try:
        for subject in SUBJECTS:
            await bus.subscribe(subject, show)
        await is_over.wait()
    finally:
        await bus.close()
