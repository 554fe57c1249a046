"""The bus: JetStream work queues, core events and requests, KV. `port` is what the fleet sees of it."""
