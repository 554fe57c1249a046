"""Make the README's picture of results from a running fleet: `python docs/pictures/make.py [URL]`."""

from __future__ import annotations

import base64
import io
import sys
import textwrap
import wave
from pathlib import Path

import numpy as np
import openai
from openai.types import ImagesResponse
from PIL import Image, ImageDraw, ImageFont

SIDE_PX, GAP_PX, TEXT_PX = 192, 16, 96
CHAT, DRAWING, SPEAKING, HEARING = "omnifleet-vlm", "omnifleet-image", "hibari", "whisper-tiny.en"
PROMPT = "a green star on a yellow background"
SENTENCE = "Good morning, everyone."
Panel = tuple[Image.Image, str]


def drawn(client: openai.OpenAI) -> Image.Image:
    """A picture of `PROMPT`."""
    answer = client.images.generate(model=DRAWING, prompt=PROMPT, extra_body={"seed": 1})
    return first_picture(answer)


def first_picture(answer: ImagesResponse) -> Image.Image:
    """The picture of an answer that has one."""
    assert answer.data is not None
    return Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or "")))


def edited(client: openai.OpenAI, picture: Image.Image) -> Image.Image:
    """The picture as a red circle."""
    answer = client.images.edit(
        model=DRAWING, image=("star.png", png(picture)), prompt="a red circle on a yellow background"
    )
    return first_picture(answer)


def described(client: openai.OpenAI, picture: Image.Image) -> str:
    """What the model that sees says of it."""
    url = "data:image/png;base64," + base64.b64encode(png(picture)).decode()
    answer = client.chat.completions.create(
        model=CHAT,
        max_tokens=32,
        temperature=0,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "Describe the picture."},
                ],
            }
        ],
    )
    return answer.choices[0].message.content or ""


def said_and_heard(client: openai.OpenAI) -> tuple[Image.Image, str]:
    """The sound of `SENTENCE` as a picture, and what is understood of it."""
    sound = client.audio.speech.create(model=SPEAKING, voice="alloy", input=SENTENCE, response_format="wav").read()
    heard = client.audio.transcriptions.create(model=HEARING, file=("hello.wav", sound))
    with wave.open(io.BytesIO(sound)) as opened:
        samples = np.frombuffer(opened.readframes(opened.getnframes()), np.int16)
    return outline(samples), heard.text.strip()


def outline(samples: np.ndarray) -> Image.Image:
    """Loudness over time, a column per pixel."""
    picture = Image.new("RGB", (SIDE_PX, SIDE_PX), (246, 246, 242))
    draw = ImageDraw.Draw(picture)
    for column, part in enumerate(np.array_split(samples.astype(np.float64) / 32768, SIDE_PX)):
        half = float(np.abs(part).max(initial=0.0)) * SIDE_PX * 0.48
        draw.line([(column, SIDE_PX / 2 - half), (column, SIDE_PX / 2 + half)], fill=(40, 90, 160))
    return picture


def png(picture: Image.Image) -> bytes:
    """The bytes of a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def strip(panels: list[Panel]) -> Image.Image:
    """Panels beside each other, words below."""
    step = SIDE_PX + GAP_PX
    sheet = Image.new("RGB", (step * len(panels) + GAP_PX, SIDE_PX + TEXT_PX + GAP_PX), (255, 255, 255))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for index, (picture, words) in enumerate(panels):
        left = GAP_PX + index * step
        sheet.paste(picture.convert("RGB").resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS), (left, GAP_PX))
        text = "\n".join(line for part in words.split("\n") for line in textwrap.wrap(part, 29))
        draw.multiline_text((left, GAP_PX + SIDE_PX + 8), text, fill=(20, 20, 20), font=font)
    return sheet


def main() -> None:
    """Ask, draw, write `results.png` beside this file."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    star = drawn(client)
    circle = edited(client, star)
    sound, heard = said_and_heard(client)
    panels = [
        (star, f"/v1/images/generations\n{PROMPT}"),
        (circle, "/v1/images/edits\na red circle on a yellow background"),
        (circle, f"/v1/chat/completions\nDescribe the picture.\n> {described(client, circle)}"),
        (sound, f"/v1/audio/speech\n{SENTENCE}\n/v1/audio/transcriptions\n> {heard}"),
    ]
    strip(panels).save(Path(__file__).parent / "results.png", optimize=True)


if __name__ == "__main__":
    main()
