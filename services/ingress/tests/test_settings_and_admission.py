"""Settings from the environment, and who is let in."""

from __future__ import annotations

import pytest

from fleet_common.settings import UnknownSettingError
from fleet_ingress.core.admission import AdmissionLimits, Load, decide
from fleet_ingress.settings import IngressSettings

_LIMITS = AdmissionLimits(max_inflight_requests=2, max_buffered_bytes=100)


def test_settings_come_from_the_environment_and_keep_keys_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_INGRESS_HTTP_PORT", "9000")
    monkeypatch.setenv("FLEET_INGRESS_API_KEYS", '{"acme": "sk-1"}')
    monkeypatch.setenv("FLEET_INGRESS_CORS_ORIGINS", '["http://a.test"]')

    settings = IngressSettings()

    assert (settings.http_port, settings.cors_origins) == (9000, ("http://a.test",))
    assert settings.api_keys["acme"].get_secret_value() == "sk-1"
    assert "sk-1" not in repr(settings)


def test_misspelt_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_INGRESS_HTTP_PROT", "9000")

    with pytest.raises(UnknownSettingError):
        IngressSettings()


@pytest.mark.parametrize(
    ("load", "body_bytes", "reason"),
    [
        (Load(), 10, None),
        (Load(num_inflight=1, buffered_bytes=50), 50, None),
        (Load(num_inflight=2), 0, "inflight"),
        (Load(num_inflight=1, buffered_bytes=50), 51, "body_bytes"),
        (Load(), 1000, None),
        (Load(is_draining=True), 0, "draining"),
    ],
)
def test_admission_is_by_count_bytes_and_drain(load: Load, body_bytes: int, reason: str | None) -> None:
    refusal = decide(load, _LIMITS, body_bytes)

    assert reason == (refusal.reason if refusal is not None else None)
