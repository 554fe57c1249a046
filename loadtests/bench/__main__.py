"""`python -m loadtests.bench [PART ...]`: measure, print a line per figure, write build/bench.json."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

import msgspec

from loadtests.bench.figure import Figure

#: Part name -> module with `figures() -> list[Figure]`; cheap ones first.
PARTS = {
    "tensors": "loadtests.bench.tensors",
    "connectors": "loadtests.bench.connectors",
    "bus": "loadtests.bench.bus",
    "hop": "loadtests.bench.hop",
    "packed": "loadtests.bench.packed",
    "wire": "loadtests.bench.wire",
    "fanout": "loadtests.bench.fanout",
    "control-plane": "loadtests.bench.control_plane",
    "diffusion": "loadtests.bench.diffusion",
    "pictures": "loadtests.bench.pictures",
    "speech": "loadtests.bench.speech",
    "monolith": "loadtests.bench.monolith",
}
OUTPUT = Path("build/bench.json")


def _merged(fresh: list[Figure]) -> list[dict[str, object]]:
    """Figures of this run over those of earlier partial runs, by name."""
    known: dict[str, dict[str, object]] = {}
    if OUTPUT.exists():
        known = {row["name"]: row for row in msgspec.json.decode(OUTPUT.read_bytes())["figures"]}
    known |= {figure.name: {**msgspec.to_builtins(figure)} for figure in fresh}
    return list(known.values())


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; none: all")
    chosen = parser.parse_args().parts or list(PARTS)
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    figures: list[Figure] = []
    for part in chosen:
        started_s = time.monotonic()
        print(f"# {part}", flush=True)
        for figure in importlib.import_module(PARTS[part]).figures():
            print(figure.line(), flush=True)
            figures.append(figure)
        print(f"# {part}: {time.monotonic() - started_s:.0f} s", flush=True)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_bytes(msgspec.json.format(msgspec.json.encode({"figures": _merged(figures)})))
    print(f"wrote {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
