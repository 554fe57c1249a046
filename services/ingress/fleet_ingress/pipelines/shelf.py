"""The folder of pipelines: read at the start, and again whenever a file changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from fleet_common.clock import Clock
from fleet_ingress.core.pipeline_file import Pipeline, PipelineFault, read_pipeline

log = structlog.get_logger(__name__)

_LOOK_EVERY_S = 1.0
_SUFFIXES = (".yaml", ".yml")
#: Larger than any file of ours; what is larger is no pipeline.
_MAX_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class ShelfFile:
    """What became of one file.

    Attributes:
        stamp: of the bytes that were read: another stamp, other bytes.
        pipeline: the last good one of this file, None when there never was any.
        fault: what is wrong with the file as it is now, `FILE:LINE: reason`; "" for nothing.
        is_taken: its fault is that another file has the id, which may go.
    """

    stamp: tuple[int, int, int]
    pipeline: Pipeline | None
    fault: str = ""
    is_taken: bool = False


@dataclass(frozen=True, slots=True)
class Shelf:
    """An immutable snapshot, by the name of the file."""

    files: Mapping[str, ShelfFile] = field(default_factory=dict)

    def pipelines(self) -> dict[str, tuple[Pipeline, str]]:
        """Pipelines by id, each with what is wrong with its file now."""
        return {file.pipeline.name: (file.pipeline, file.fault) for file in self.files.values() if file.pipeline}

    def refused(self) -> dict[str, str]:
        """Files without any pipeline: what clients would call it -> what is wrong."""
        return {Path(name).stem: file.fault for name, file in self.files.items() if file.pipeline is None}


class PipelineShelf:
    """Follows a folder; `shelf` is always the newest snapshot. No folder: nothing, ever."""

    def __init__(self, folder: Path | None, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self.shelf = Shelf()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Read the folder, and follow it while the block runs."""
        if self._folder is None:
            yield
            return
        await self._look()
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look_for_ever())
            try:
                yield
            finally:
                looking.cancel()

    async def _look_for_ever(self) -> None:
        while True:
            await self._clock.sleep(_LOOK_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        assert self._folder is not None
        before = self.shelf
        self.shelf = await asyncio.to_thread(read_folder, self._folder, before)
        for name, file in self.shelf.files.items():
            if before.files.get(name) == file:
                continue
            if file.fault:
                log.error("pipeline_refused", fault=file.fault, still_served=file.pipeline is not None)
            elif file.pipeline is not None:
                log.info("pipeline_served", file=name, pipeline=file.pipeline.name)
        for name in before.files.keys() - self.shelf.files.keys():
            log.info("pipeline_gone", file=name)


def read_folder(folder: Path, before: Shelf) -> Shelf:
    """The folder as it is now; files that did not change are not read again."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and not path.name.startswith("."))
    except OSError as err:
        if before.files:
            log.error("pipeline_folder_unreadable", reason=err.strerror)
        return before
    files: dict[str, ShelfFile] = {}
    owners: dict[str, str] = {}
    # Who has an id keeps it: a file that comes later and claims it is refused, whatever its name.
    for path in sorted(paths, key=lambda path: (_has_none(before, path.name), path.name)):
        try:
            files[path.name] = _read_file(path, before.files.get(path.name), owners)
        except FileNotFoundError:
            continue
        found = files[path.name].pipeline
        if found is not None:
            owners[found.name] = path.name
    return Shelf({name: files[name] for name in sorted(files)})


def _has_none(before: Shelf, name: str) -> bool:
    file = before.files.get(name)
    return file is None or file.pipeline is None


def _read_file(path: Path, known: ShelfFile | None, owners: Mapping[str, str]) -> ShelfFile:
    stat = path.stat()
    stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    if known is not None and known.stamp == stamp and not known.is_taken:
        return known
    # What was served goes on being served: its file is wrong now, not the requests.
    last = known.pipeline if known is not None else None
    try:
        found = _parsed(path)
    except PipelineFault as err:
        return ShelfFile(stamp, last, str(err))
    owner = owners.get(found.name)
    if owner is not None:
        fault = PipelineFault(path.name, found.line, f"`{found.name}` is the pipeline of {owner} already")
        return ShelfFile(stamp, last, str(fault), is_taken=True)
    return ShelfFile(stamp, found)


def _parsed(path: Path) -> Pipeline:
    """The pipeline in a file. Raises PipelineFault, FileNotFoundError."""
    try:
        data = path.read_bytes()
        text = data.decode()
    except UnicodeDecodeError as err:
        raise PipelineFault(path.name, 1 + err.object.count(b"\n", 0, err.start), "the file is no UTF-8 text") from err
    except FileNotFoundError:
        raise
    except OSError as err:
        raise PipelineFault(path.name, 1, f"the file cannot be read: {err.strerror}") from err
    if len(data) > _MAX_BYTES:
        raise PipelineFault(path.name, 1, f"a file has at most {_MAX_BYTES} bytes")
    return read_pipeline(text, path.name)
