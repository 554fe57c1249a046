"""Files of pipelines: what is right, and which line is wrong; and the folder of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_ingress.core.pipeline_file import PipelineFault, Source, read_pipeline
from fleet_ingress.core.sentence_feed import SentenceFeed
from fleet_ingress.pipelines.shelf import Shelf, read_folder

SHIPPED = Path(__file__).parents[3] / "pipelines"
GOOD = """\
pipeline: talk
inputs: [audio]
steps:
  - id: hear
    stage: transcribe
    model: asr
    inputs: {audio: input.audio}
  - id: answer
    stage: chat
    model: llm
    inputs: {text: hear.text}
    params:
      temperature: 0
      max_tokens: 20
  - id: say
    stage: speak
    model: tts
    inputs: {text: answer.text}
    stream: [text]
outputs:
  text: answer.text
  audio: say.audio
"""


def fault(text: str) -> str:
    with pytest.raises(PipelineFault) as caught:
        read_pipeline(text, "talk.yaml")
    return str(caught.value)


def test_a_pipeline_is_steps_in_their_order_with_checked_edges() -> None:
    found = read_pipeline(GOOD, "talk.yaml")

    assert found.models == ("asr", "llm", "tts")
    assert [step.inputs for step in found.steps] == [
        {"audio": Source("", "audio")},
        {"text": Source("hear", "text")},
        {"text": Source("answer", "text")},
    ]
    assert found.steps[2].streamed == {"text"}
    assert found.outputs == {"text": Source("answer", "text"), "audio": Source("say", "audio")}
    assert found.answering_step == "answer"


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_files_that_come_along_are_right(path: Path) -> None:
    assert read_pipeline(path.read_text(), path.name).name == path.stem


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("pipeline: talk\n", "", "talk.yaml:1: `pipeline` is missing"),
        ("pipeline: talk", "pipeline: Talk!", "talk.yaml:1: an id has small letters"),
        ("pipeline: talk", "pipeline: talk\npipeline: talk", "talk.yaml:2: `pipeline` is there twice"),
        ("inputs: [audio]\nsteps", "inputs: [smell]\nsteps", "talk.yaml:2: Invalid enum value 'smell'"),
        ("inputs: [audio]\nsteps", "inputs: [audio, image]\nsteps", "talk.yaml:2: no step takes `input.image`"),
        ("steps:", "steps: [", "talk.yaml:4: expected the node content"),
        ("stage: chat", "stage: chant", "talk.yaml:9: `stage` is one of: transcribe, chat, draw, speak"),
        ("    model: asr\n", "", "talk.yaml:4: `model` is missing"),
        ("    model: asr\n", "    model: asr\n    modle: x\n", "talk.yaml:7: unknown field `modle`"),
        ("max_tokens: 20", "max_tokens: many", "talk.yaml:14: `max_tokens`: Expected `int | null`, got `str`"),
        ("temperature: 0", "temperature: 9", "talk.yaml:13: `temperature`: Expected `float` <= 2.0"),
        ("temperature: 0", "heat: 0", "talk.yaml:13: unknown field `heat`"),
        ("temperature: 0", "prompt: Hello", "talk.yaml:13: `prompt` holds `{text}` when"),
        ("id: answer", "id: hear", "talk.yaml:8: there is a step `hear` already"),
        ("id: answer", "id: input", "talk.yaml:8: a step's id is"),
        ("text: hear.text", "text: say.audio", "talk.yaml:11: no step before this one is called `say`"),
        ("text: hear.text", "text: hear.audio", "talk.yaml:11: `hear` gives `text`, no `audio`"),
        ("text: hear.text", "image: hear.text", "talk.yaml:11: `image` cannot be `hear.text`: that is text"),
        ("text: hear.text", "sound: hear.text", "talk.yaml:11: `chat` takes no `sound`"),
        ("text: hear.text", "history: input.history", "talk.yaml:11: `chat` needs `text`, `image` or `messages`"),
        ("text: hear.text", "text: hear", "talk.yaml:11: `hear` is neither"),
        ("text: hear.text", "text: input.text", "talk.yaml:11: `text` is not among the inputs"),
        ("stream: [text]", "stream: [audio]", "talk.yaml:19: `audio` is no input of this step"),
        ("{text: answer.text}", "{text: hear.text}", "talk.yaml:19: only text that a `chat` step writes"),
        ("text: answer.text\n  audio", "image: answer.text\n  audio", "talk.yaml:21: the output `image` cannot be"),
        ("  audio: say.audio\n", "", "talk.yaml:15: nothing takes what `say` makes"),
        ("pipeline: talk", "pipeline: !!python/name:os.system x", "talk.yaml:1: could not determine a constructor"),
        ("pipeline: talk", "? [a]\n: b", "talk.yaml:1: a key is text"),
    ],
)
def test_a_fault_names_the_file_and_the_line(old: str, new: str, wanted: str) -> None:
    assert old in GOOD
    found = fault(GOOD.replace(old, new, 1))

    assert found.startswith(wanted)


def test_what_is_no_mapping_is_refused() -> None:
    assert fault("") == "talk.yaml:1: the file is empty"
    assert fault("- a") == "talk.yaml:1: Expected `object`, got `array`"
    assert fault("a: \x07").startswith("talk.yaml:1: a character that YAML does not allow")


def test_aliases_of_aliases_do_not_fill_the_memory() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]

    assert "the file holds too much" in fault("\n".join(lines))


@given(st.text(alphabet="ab.: -[]{}\n&*!?'\"#|>", max_size=60))
def test_any_text_is_a_pipeline_or_a_fault(text: str) -> None:
    with pytest.raises(PipelineFault):
        read_pipeline(text, "f.yaml")


def named(name: str) -> str:
    return GOOD.replace("talk", name, 1)


def served(shelf: Shelf) -> dict[str, str]:
    return {name: fault for name, (_, fault) in shelf.pipelines().items()}


def test_a_folder_gives_what_is_right_and_refuses_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(named("a"))
    (tmp_path / "b.yaml").write_text(named("b").replace("stage: speak", "stage: shout"))
    (tmp_path / "notes.txt").write_text("no pipeline")
    (tmp_path / "c.yml").write_bytes(b"pipeline: c\n\xff")

    shelf = read_folder(tmp_path, Shelf())

    assert served(shelf) == {"a": ""}
    assert {name: text.partition(": ")[0] for name, text in shelf.refused().items()} == {
        "b": "b.yaml:16",
        "c": "c.yml:2",
    }


def test_a_file_that_turns_wrong_leaves_what_was_served(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(named("a"))
    first = read_folder(tmp_path, Shelf())

    path.write_text(named("a") + "nonsense: 1\n")
    second = read_folder(tmp_path, first)
    path.write_text(named("a2"))
    third = read_folder(tmp_path, second)
    path.unlink()
    fourth = read_folder(tmp_path, third)

    assert served(second) == {"a": "a.yaml:23: unknown field `nonsense`"}
    assert served(third) == {"a2": ""}
    assert served(fourth) == {}


def test_who_has_an_id_keeps_it_and_the_next_gets_it(tmp_path: Path) -> None:
    (tmp_path / "z.yaml").write_text(named("one"))
    first = read_folder(tmp_path, Shelf())
    (tmp_path / "a.yaml").write_text(named("one"))
    second = read_folder(tmp_path, first)
    (tmp_path / "z.yaml").unlink()
    third = read_folder(tmp_path, second)

    assert second.refused() == {"a": "a.yaml:1: `one` is the pipeline of z.yaml already"}
    assert served(second) == served(third) == {"one": ""}
    assert third.refused() == {}


def test_a_folder_that_is_out_of_reach_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(named("a"))
    first = read_folder(tmp_path, Shelf())

    assert read_folder(tmp_path / "gone", first) is first


def fed(text: str, size: int) -> list[str]:
    feed = SentenceFeed()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [sentence for piece in pieces for sentence in feed.push(piece)] + list(feed.end())


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_sentences_are_the_same_however_the_text_comes(size: int) -> None:
    text = "Dr. Who came at noon. He left! Why? Nobody knows, e.g. me. The end"

    assert fed(text, size) == ["Dr. Who came at noon.", "He left!", "Why?", "Nobody knows, e.g. me.", "The end"]


def test_a_sentence_is_given_once_the_next_begins() -> None:
    feed = SentenceFeed()

    assert [feed.push(piece) for piece in ("One two.", " ", "Three")] == [(), (), ("One two.",)]
    assert feed.end() == ("Three",)
