"""Stores that take seconds to start are started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet_common.testing.servers import MooncakeServers, ServerProcess, mooncake_servers, yuanrong_worker


@pytest.fixture(scope="session")
def mooncake() -> Iterator[MooncakeServers]:
    with mooncake_servers() as running:
        yield running


@pytest.fixture(scope="session")
def yuanrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch, yuanrong_worker() as running:
        # The client library writes its own log, into the home folder unless told otherwise.
        patch.setenv("DATASYSTEM_CLIENT_LOG_DIR", str(tmp_path_factory.mktemp("yuanrong-client")))
        yield running
