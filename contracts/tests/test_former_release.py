"""Two releases understand each other: messages of the former one are kept and read, and it reads today's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgpack
import msgspec
import pytest

from fleet_contracts import codec
from fleet_contracts.base import Modality
from fleet_contracts.control import ModelCard, WorkerInfo
from fleet_contracts.embed import EmbedParams
from fleet_contracts.events import Finished
from fleet_contracts.examples import EXAMPLES
from fleet_contracts.work import FIRST_RELEASE_TAGS, StepTask, TaskHead
from tests.support.releases import unpack

CONTRACTS = Path(__file__).parent.parent
KEPT = sorted(CONTRACTS.glob("golden-*/*.msgpack"))
BY_TAG = {str(type(example).__struct_config__.tag): example for example in EXAMPLES}

#: Reads every file of a folder as the former release does: by its tag, with its own structs.
_READER = """
import json, sys
from pathlib import Path
import msgspec
from fleet_contracts.examples import EXAMPLES
known = {str(type(e).__struct_config__.tag): type(e) for e in EXAMPLES}
own = {str(type(e).__struct_config__.tag): e for e in EXAMPLES}
found = {}
for path in sorted(Path(sys.argv[1]).glob("*.msgpack")):
    tag = path.stem.partition("+")[0]
    if tag not in known:
        found[path.stem] = "unknown tag"
        continue
    try:
        message = msgspec.msgpack.decode(path.read_bytes(), type=known[tag])
    except msgspec.DecodeError as error:
        found[path.stem] = f"refused: {error}"
    else:
        found[path.stem] = "same" if message == own[tag] else "read"
print(json.dumps(found))
"""


def with_fields(example: msgspec.Struct, **fields: object) -> msgspec.Struct:
    return msgspec.structs.replace(example, **fields)


def later_task() -> StepTask:
    """Work of today that the former release has no name for."""
    task = BY_TAG["step_task.v1"]
    assert isinstance(task, StepTask)
    last = msgspec.structs.replace(task.plan.steps[-1], params=EmbedParams())
    return msgspec.structs.replace(task, plan=msgspec.structs.replace(task.plan, steps=(*task.plan.steps[:-1], last)))


@pytest.fixture(scope="module")
def read_by_the_former_release(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What it makes of today's messages: the golden ones, and some with every field that came later."""
    release = unpack(tmp_path_factory.mktemp("former"))
    folder = tmp_path_factory.mktemp("messages")
    for tag, example in BY_TAG.items():
        (folder / f"{tag}.msgpack").write_bytes(codec.encode(example))
    worker, finished = BY_TAG["worker_info.v1"], BY_TAG["finished.v1"]
    assert isinstance(worker, WorkerInfo) and isinstance(finished, Finished)
    card = ModelCard(model="emb", output_modalities=(Modality.EMBEDDING,), embedding_dimensions=(64, 128))
    more = {
        "worker_info.v1": with_fields(worker, accepted_tags=codec.ACCEPTED_TAGS, cards=(card,)),
        "finished.v1": with_fields(finished, outputs=dict.fromkeys(("vectors",), _ref())),
        "step_task.v1": later_task(),
    }
    for tag, message in more.items():
        (folder / f"{tag}+later.msgpack").write_bytes(codec.encode(message))
    answer = subprocess.run(
        [sys.executable, "-c", _READER, str(folder)],
        env={"PYTHONPATH": release.python_path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found: dict[str, str] = json.loads(answer.stdout)
    return found


def _ref() -> object:
    task = BY_TAG["step_task.v1"]
    assert isinstance(task, StepTask)
    return task.root


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_message_of_a_former_release_is_read(path: Path) -> None:
    example = BY_TAG[path.stem]

    assert msgspec.msgpack.decode(path.read_bytes(), type=type(example)) == example


def test_messages_of_a_former_release_are_kept() -> None:
    assert len(KEPT) >= 22


def test_the_former_release_reads_todays_messages(read_by_the_former_release: dict[str, str]) -> None:
    known = {path.stem for path in KEPT}

    assert {tag: read_by_the_former_release[tag] for tag in known} == dict.fromkeys(known, "same")


def test_fields_it_does_not_know_are_left_out(read_by_the_former_release: dict[str, str]) -> None:
    assert read_by_the_former_release["worker_info.v1+later"] == "read"
    assert read_by_the_former_release["finished.v1+later"] == "same"


def test_work_it_has_no_name_for_is_refused_clearly(read_by_the_former_release: dict[str, str]) -> None:
    assert "embed.v1" in read_by_the_former_release["step_task.v1+later"]
    assert read_by_the_former_release["embed.v1"] == "unknown tag"


def test_such_work_names_the_tags_it_needs() -> None:
    old = WorkerInfo(**{**msgspec.structs.asdict(BY_TAG["worker_info.v1"]), "accepted_tags": ("step_task.v1",)})
    new = msgspec.structs.replace(old, accepted_tags=codec.ACCEPTED_TAGS)
    task = later_task()

    assert task.plan.later_tags == {"embed.v1"}
    assert (old.accepts(task.plan.later_tags), new.accepts(task.plan.later_tags)) == (False, True)
    assert old.accepts(BY_TAG["step_task.v1"].plan.later_tags)  # type: ignore[attr-defined]
    assert set(codec.ACCEPTED_TAGS) > FIRST_RELEASE_TAGS


def test_the_head_of_any_work_can_be_read() -> None:
    plain = msgpack.unpackb(codec.encode(later_task()))
    plain["plan"] = {"type": "plan.v9", "graph": {}}

    head = codec.decode_task_head(msgpack.packb(plain))

    assert isinstance(head, TaskHead)
    assert (head.request_id, head.step_id) == (later_task().request_id, later_task().step_id)
    with pytest.raises(codec.DecodeError):
        codec.decode_task(msgpack.packb(plain))
