"""What makes the whole suite quick: nothing here changes what a test sees."""

from __future__ import annotations

import functools
import gc
import ssl

import pytest
import structlog

# Every HTTP client that a test opens would read the certificate bundle again: 30 ms, and none of them speaks TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Tracebacks that are logged, without a renderer that colours source code: a second of the suite.
_plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], _plain])

# Until all is collected: what is loaded meanwhile stays.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What collection has loaded stays to the end: without this the collector walks over it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()
