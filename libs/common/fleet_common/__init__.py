"""What the services share: errors, settings, bus, tensor store, stage runner, scheduling, telemetry."""
