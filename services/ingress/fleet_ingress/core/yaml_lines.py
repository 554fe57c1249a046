"""YAML as plain values, and the line on which each of them stands. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml  # type: ignore[import-untyped]

#: Keys and indices from the top of a document.
Place = tuple[str | int, ...]

#: More than any file of ours has: an alias of an alias makes a small file a large one.
_MAX_NODES = 5_000
_MAX_DEPTH = 50


class YamlFault(Exception):
    """What is wrong with a document, and on which line."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


@dataclass(slots=True)
class Document:
    """Plain values and the lines of all of them, from 1."""

    value: Any = None
    lines: dict[Place, int] = field(default_factory=dict)

    def line(self, place: Place) -> int:
        """The line of a value; where there is none at that place, of what it would belong to."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)


def read_yaml(text: str) -> Document:
    """Read one document of mappings, lists and scalars. Raises YamlFault."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as err:
        raise YamlFault(1 + text.count("\n", 0, err.position), "a character that YAML does not allow") from err
    try:
        node = loader.get_single_node()
        if node is None:
            raise YamlFault(1, "the file is empty")
        return _Reader(loader).read(node)
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        raise YamlFault(mark.line + 1 if mark else 1, err.problem or err.context or "no YAML") from err
    finally:
        loader.dispose()


class _Reader:
    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._document = Document()
        self._num_nodes = 0

    def read(self, node: yaml.Node) -> Document:
        self._document.lines[()] = _line(node)
        self._document.value = self._value(node, ())
        return self._document

    def _value(self, node: yaml.Node, place: Place) -> Any:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES or len(place) > _MAX_DEPTH:
            raise YamlFault(_line(node), "the file holds too much")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        self._document.lines.setdefault(place, _line(node))
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*place, number)) for number, item in enumerate(node.value)]
        try:
            return self._loader.construct_object(node)
        except ValueError as err:
            # Such as `2026-13-45`: a date by its looks.
            raise YamlFault(_line(node), str(err)) from err

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        self._document.lines.setdefault(place, _line(node))
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._loader.construct_object(key_node, deep=True) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise YamlFault(_line(key_node), "a key is text")
            if key in found:
                raise YamlFault(_line(key_node), f"`{key}` is there twice")
            # Of the key: a value may begin on the next line.
            self._document.lines[(*place, key)] = _line(key_node)
            found[key] = self._value(value_node, (*place, key))
        return found


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1
