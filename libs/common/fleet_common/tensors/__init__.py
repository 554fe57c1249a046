"""The tensor store: one port; connectors for memory, one host (arena) and across hosts (Redis, Mooncake, Yuanrong).

`factory.open_store` makes a process's store, `router` chooses the connector, `spill` serves readers elsewhere.

A new network connector is a subclass of `keyed.KeyedConnector` (framing, keys and misses are there), one row in
`factory.NETWORK_CONNECTORS`, its settings, and a subclass of
`fleet_common.testing.tensor_conformance.ConnectorConformance` with its `rig`.
"""
