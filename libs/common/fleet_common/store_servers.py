"""Command lines of the network stores' servers, on loopback: for `fleet up` and the tests. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_HOST = "127.0.0.1"


def mooncake_master_command(binary: Path, port: int, metrics_port: int) -> tuple[str, ...]:
    """The master: keys and places, no bytes. It keeps what is pinned until its time is over."""
    return (
        str(binary),
        f"--rpc_address={_HOST}",
        f"--rpc_port={port}",
        f"--metrics_host={_HOST}",
        f"--metrics_port={metrics_port}",
        "--allow_evict_soft_pinned_objects=false",
        "--logtostderr",
    )


def mooncake_node_command(binary: Path, port: int, master_port: int, memory_mb: int) -> tuple[str, ...]:
    """A storage node. Its data port is any free one on every address: the library cannot be told otherwise."""
    return (
        str(binary),
        f"--host={_HOST}",
        f"--port={port}",
        f"--master_server_address={_HOST}:{master_port}",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
        f"--global_segment_size={memory_mb} MB",
        "--logtostderr",
    )


def yuanrong_command(binary: Path, ports: tuple[int, int], folder: Path, memory_mb: int) -> tuple[str, ...]:
    """A worker that brings its own metastore.

    Args:
        ports: of the worker and of the metastore.
        folder: for its files; a Unix socket lies in it, so that its path has 80 characters at most.
    """
    options = {
        "worker_address": f"{_HOST}:{ports[0]}",
        "metastore_address": f"{_HOST}:{ports[1]}",
        "start_metastore_service": "true",
        "shared_memory_size_mb": memory_mb,
        "unix_domain_socket_dir": folder / "uds",
        "rocksdb_store_dir": folder / "rocksdb",
        "monitor_config_file": folder / "config",
        "health_check_path": folder / "healthy",
        "ready_check_path": yuanrong_ready_path(folder),
        "log_dir": folder / "logs",
        "log_monitor": "false",
        # Streams are not used.
        "sc_local_cache_memory_size_mb": 16,
        "sc_thread_num": 4,
        "master_sc_thread_num": 4,
        "sc_scan_thread_num": 1,
        "sc_regular_socket_num": 1,
        "sc_stream_socket_num": 1,
        "oc_thread_num": 8,
        "rpc_thread_num": 8,
    }
    return (str(binary), *(f"--{name}={value}" for name, value in options.items()))


def yuanrong_ready_path(folder: Path) -> Path:
    """Exists once the worker can work: it listens seconds earlier."""
    return folder / "ready"


def yuanrong_environment(binary: Path) -> Mapping[str, str]:
    """Where the worker finds its libraries."""
    return {"LD_LIBRARY_PATH": str(binary.parent / "lib")}
