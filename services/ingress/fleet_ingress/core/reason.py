"""What a client is told of why a model failed to load: no class names, no places in a file system."""

from __future__ import annotations

import re

_CLASS = re.compile(r"\b(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)\b:?\s*")
_LOG = re.compile(r"\s*\(see [^)]*\)")
_PATH = re.compile(r"(?<![\w:/.])~?(?:/[\w.@+~-]+)+/?")
_MAX_CHARACTERS = 300


def public_reason(error: str) -> str:
    """One line; of a path only its last part is left."""
    text = _CLASS.sub("", _LOG.sub("", error))
    text = _PATH.sub(lambda match: match[0].rstrip("/").rpartition("/")[2], text)
    return " ".join(text.split())[:_MAX_CHARACTERS]
