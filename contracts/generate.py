"""Write what is made from the structs: JSON Schema, AsyncAPI, OpenAPI, golden bytes. `--check` only compares.

`--freeze RELEASE` copies the golden bytes of a release to `golden-RELEASE`: the next one is tested against them.

Golden bytes are written once: a message version whose bytes would change is an error, never an overwrite.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec

from fleet_contracts import codec
from fleet_contracts.channels import CHANNELS, Channel
from fleet_contracts.examples import EXAMPLES

HERE = Path(__file__).resolve().parent
Schema = dict[str, Any]


def tag_of(struct: type[msgspec.Struct]) -> str:
    """The tag of a message version, like `step_task.v1`."""
    return str(struct.__struct_config__.tag)


def json_schema() -> Schema:
    """JSON Schema of every message."""
    types = [type(example) for example in EXAMPLES]
    _, components = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Omnifleet messages",
        "$defs": components,
    }


def _channel(channel: Channel) -> Schema:
    names = [struct.__name__ for struct in (*channel.messages, *channel.replies)]
    parameters = {part[1:-1]: {} for part in channel.address.split(".") if part.startswith("{")}
    return {
        "address": channel.address,
        "description": channel.description,
        "parameters": parameters,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
        "bindings": {"nats": {}},
        "x-kind": channel.kind,
        "x-account": channel.account,
    }


def asyncapi() -> Schema:
    """AsyncAPI 3.0 document of every channel."""
    structs = {struct for channel in CHANNELS for struct in (*channel.messages, *channel.replies)}
    ordered = sorted(structs, key=lambda struct: struct.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    messages = {
        struct.__name__: {
            "name": tag_of(struct),
            "contentType": "application/msgpack",
            "payload": {"$ref": f"#/components/schemas/{struct.__name__}"},
        }
        for struct in ordered
    }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Omnifleet bus", "version": "1"},
        "channels": {channel.name: _channel(channel) for channel in CHANNELS},
        "operations": {
            f"send_{channel.name}": {"action": "send", "channel": {"$ref": f"#/channels/{channel.name}"}}
            for channel in CHANNELS
        },
        "components": {"messages": messages, "schemas": schemas},
    }


def openapi() -> Schema:
    """OpenAPI document of the ingress."""
    from fleet_ingress.app import openapi_schema  # the app is heavy: only when asked for

    return openapi_schema()


def documents() -> dict[Path, bytes]:
    """Every generated file and its content."""
    made = {"messages.schema.json": json_schema(), "asyncapi.json": asyncapi(), "openapi.json": openapi()}
    return {
        HERE / "schemas" / name: (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
        for name, content in made.items()
    }


def golden() -> dict[Path, bytes]:
    """One MessagePack file per message version."""
    return {HERE / "golden" / f"{tag_of(type(example))}.msgpack": codec.encode(example) for example in EXAMPLES}


def freeze(release: str) -> int:
    """Keep the golden bytes as those of a release; 1 when that release has some already."""
    folder = HERE / f"golden-{release}"
    if folder.exists():
        print(f"{folder.name} exists: messages of a release never change")
        return 1
    shutil.copytree(HERE / "golden", folder)
    return 0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a file would change")
    parser.add_argument("--freeze", metavar="RELEASE", default="", help="keep the golden bytes as those of a release")
    arguments = parser.parse_args()
    if arguments.freeze:
        return freeze(arguments.freeze)
    is_check = arguments.check
    stale = [path for path, content in documents().items() if not path.exists() or path.read_bytes() != content]
    new = [path for path in golden() if not path.exists()]
    broken = [path for path, content in golden().items() if path.exists() and path.read_bytes() != content]
    for path in broken:
        print(f"{path.name}: bytes of a released message changed; give the break a new tag")
    if is_check:
        for path in (*stale, *new):
            print(f"{path.name} is stale: run `make contracts`")
        return 1 if stale or new or broken else 0
    for path in stale:
        path.write_bytes(documents()[path])
    for path in new:
        path.write_bytes(golden()[path])
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
