"""Media behind URLs: what is refused before a connection, and what a bad origin can do."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet_common.errors import FleetError, InvalidInputError
from fleet_common.stage.port import Product, StepItem
from fleet_contracts.preprocess import PreprocessParams
from fleet_preprocess.core.limits import MediaLimits
from fleet_preprocess.core.media_url import FileKind, check_media_url, is_public_address, parse_allowed_hosts
from fleet_preprocess.engine.scripted import ScriptedPromptEngine
from fleet_preprocess.fetch import FetchLimits, MediaFetcher
from fleet_preprocess.worker import PreprocessEngine

SHARED_CASES = Path(__file__).resolve().parents[4] / "shared" / "cases"
Run = Callable[..., Awaitable[Product | FleetError]]
Handler = Callable[[httpx.Request], httpx.Response]
PARAM = "messages[0].content[1].image_url"
IMAGE = FileKind("image", 50_000)


class EvilOrigin:
    """The misbehaving origin of the cases, in this process; counts what reached it."""

    def __init__(self) -> None:
        spec = importlib.util.spec_from_file_location("evil_media_server", SHARED_CASES / "evil_media_server.py")
        assert spec is not None and spec.loader is not None, "the failure cases are needed beside the checkout"
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.hits: list[str] = []
        hits = self.hits

        class Handler(module.H):
            def log_message(self, *_: Any) -> None:
                hits.append(self.path)

        self.server = module.S(("127.0.0.1", 0), Handler)
        self.port: int = self.server.server_address[1]

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def redirect(self, target: str) -> str:
        return self.url("/to/" + base64.urlsafe_b64encode(target.encode()).decode().rstrip("="))


@pytest.fixture
def origin() -> Iterator[EvilOrigin]:
    made = EvilOrigin()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.socket.close()
    thread.join()


@pytest.fixture
async def fetcher(origin: EvilOrigin) -> AsyncIterator[MediaFetcher]:
    transport = httpx.AsyncHTTPTransport(trust_env=False)
    allowed = parse_allowed_hosts([f"127.0.0.1:{origin.port}"])
    made = MediaFetcher(allowed, FetchLimits(total_s=0.3), transport=transport)
    yield made
    await made.close()


async def refusal(fetcher: MediaFetcher, url: str) -> tuple[str, str]:
    with pytest.raises(InvalidInputError) as caught:
        await fetcher.fetch(url, IMAGE, param=PARAM)
    assert caught.value.param == PARAM
    return caught.value.code, str(caught.value)


async def test_allowed_origin_is_fetched(origin: EvilOrigin, fetcher: MediaFetcher) -> None:
    assert (await fetcher.fetch(origin.url("/ok.png"), IMAGE, param=PARAM)).startswith(b"\x89PNG")
    assert (await fetcher.fetch(origin.redirect(origin.url("/ok.png")), IMAGE, param=PARAM)).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("path", "words"),
    [("/missing", "status 404"), ("/busy", "status 503"), ("/hang", "timeout"), ("/short", "ended early")],
)
async def test_bad_origin_is_named_with_its_fault(
    origin: EvilOrigin, fetcher: MediaFetcher, path: str, words: str
) -> None:
    """Case A33."""
    code, message = await refusal(fetcher, origin.url(path))

    assert code == "image_fetch_failed"
    assert words in message
    assert "127.0.0.1" in message
    assert "later" not in message


async def test_fetched_bytes_are_judged_like_sent_ones(
    origin: EvilOrigin, fetcher: MediaFetcher, make_item: Callable[[Any, PreprocessParams], StepItem]
) -> None:
    engine = PreprocessEngine("vlm", ScriptedPromptEngine({}), MediaLimits(), fetcher=fetcher)
    await engine.start()
    urls = [origin.url("/ok.png"), origin.url("/html"), "http://127.0.0.1:8222/varz"]
    parts = [[{"type": "image_url", "image_url": {"url": url}}] for url in urls]
    bodies = [{"messages": [{"role": "user", "content": part}]} for part in parts]

    results = await engine.run([make_item(body, PreprocessParams()) for body in bodies])

    assert isinstance(results[0], Product)
    refused = [result.code for result in results[1:] if isinstance(result, InvalidInputError)]
    assert refused == ["invalid_image", "url_not_allowed"]
    assert "login" not in str(results[1])


async def test_redirects_are_followed_three_times_at_most(origin: EvilOrigin, fetcher: MediaFetcher) -> None:
    url = origin.url("/ok.png")
    chain = []
    for _ in range(4):
        url = origin.redirect(url)
        chain.append(url)

    assert (await fetcher.fetch(chain[2], IMAGE, param=PARAM)).startswith(b"\x89PNG")
    assert (await refusal(fetcher, chain[3]))[0] == "image_fetch_failed"
    assert (await refusal(fetcher, origin.url("/loop")))[0] == "image_fetch_failed"


async def test_redirect_inside_is_refused_without_a_connection(origin: EvilOrigin, fetcher: MediaFetcher) -> None:
    canary = EvilOrigin()
    targets = [canary.url("/varz"), "file:///etc/passwd", f"http://localhost:{origin.port}/ok.png", "//10.0.0.1/x"]

    codes = [(await refusal(fetcher, origin.redirect(target)))[0] for target in targets]

    assert codes == ["url_not_allowed"] * 4
    assert canary.hits == []
    assert len(origin.hits) == 4
    canary.server.socket.close()


INNER_URLS = [
    "http://127.0.0.1:8222/varz",
    "http://169.254.169.254/latest/meta-data/",
    "http://10.0.0.1/",
    "http://[::1]/",
    "http://localhost:4222",
    "file:///etc/passwd",
    "file:///does/not/exist",
    "/etc/passwd",
    "../../etc/passwd",
    "file://localhost/etc/hostname",
    "\\\\host\\share",
    "http://user@cdn.example/x.png",
    "http://cdn.example:22/",
    "http://cdn.example\n.evil/",
    "ftp://cdn.example/x.png",
    "http://cdn.example.evil/",
    "http://[::1",
    "http://cdn.example:99999/",
    "x",
]


@pytest.mark.parametrize("url", INNER_URLS)
async def test_url_off_the_list_is_refused_with_one_answer(run: Run, url: str) -> None:
    content = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}]

    without_hosts = await run({"messages": [{"role": "user", "content": content}]})
    with pytest.raises(InvalidInputError) as with_hosts:
        check_media_url(url, parse_allowed_hosts(["cdn.example", "10.0.0.2:80"]), param=PARAM)

    assert isinstance(without_hosts, InvalidInputError)
    for error in (without_hosts, with_hosts.value):
        assert (error.code, error.param) == ("url_not_allowed", PARAM)
        assert str(error) == "media must be data: URLs or come from a host this server allows"


def mock_fetcher(
    handler: Handler, addresses: Sequence[str], allowed: Sequence[str] = ("cdn.example", "inner.example:8080")
) -> MediaFetcher:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    limits = FetchLimits(total_s=5)
    transport = httpx.MockTransport(handler)
    return MediaFetcher(parse_allowed_hosts(allowed), limits, transport=transport, resolve=resolve)


async def test_connection_goes_to_the_address_that_was_checked() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b"img"))

    body = await mock_fetcher(answer, ["93.184.216.34"]).fetch("https://CDN.example./a?b=c", IMAGE, param=PARAM)

    assert body == b"img"
    assert str(seen[0].url) == "https://93.184.216.34/a?b=c"
    assert seen[0].headers["host"] == "cdn.example"
    assert seen[0].extensions["sni_hostname"] == "cdn.example"


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.1.2.3", "::1", "fe80::1", "::ffff:10.0.0.1"])
async def test_allowed_name_that_leads_inside_is_refused(address: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise AssertionError("nothing may be asked")

    fetcher = mock_fetcher(answer, ["93.184.216.34", address])

    assert (await refusal(fetcher, "http://cdn.example/x"))[0] == "url_not_allowed"


async def test_host_listed_with_its_port_may_be_inside() -> None:
    fetcher = mock_fetcher(lambda request: httpx.Response(200, stream=httpx.ByteStream(b"img")), ["10.1.2.3"])

    assert await fetcher.fetch("http://inner.example:8080/x", IMAGE, param=PARAM) == b"img"
    assert (await refusal(fetcher, "http://inner.example/x"))[0] == "url_not_allowed"


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (httpx.Response(200, stream=httpx.ByteStream(b"x" * 50_001)), "image_too_large"),
        (httpx.Response(200, content=b"x", headers={"content-encoding": "gzip"}), "image_fetch_failed"),
        (httpx.Response(304), "image_fetch_failed"),
        (httpx.Response(302), "image_fetch_failed"),
    ],
)
async def test_strange_answers_are_refused(response: httpx.Response, code: str) -> None:
    assert (await refusal(mock_fetcher(lambda request: response, ["93.184.216.34"]), "http://cdn.example/"))[0] == code


async def test_url_no_client_can_send_is_refused() -> None:
    fetcher = mock_fetcher(lambda request: httpx.Response(200), ["93.184.216.34"])

    assert (await refusal(fetcher, "http://cdn.example/" + "x" * 70_000))[0] == "url_not_allowed"


async def test_cancelling_a_fetch_is_not_a_timeout(origin: EvilOrigin, fetcher: MediaFetcher) -> None:
    task = asyncio.ensure_future(fetcher.fetch(origin.url("/hang"), IMAGE, param=PARAM))
    await asyncio.sleep(0.05)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("93.184.216.34", True),
        ("2606:4700::1111", True),
        ("0.0.0.0", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("192.168.1.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),
        ("fd00::1", False),
        ("fe80::1%eth0", False),
        ("::", False),
    ],
)
def test_public_addresses(address: str, is_public: bool) -> None:
    assert is_public_address(address) is is_public


@pytest.mark.parametrize("entry", ["http://cdn.example", "cdn.example/x", "", "u@cdn.example", "cdn.example:x"])
def test_bad_host_entry_stops_the_start(entry: str) -> None:
    with pytest.raises(ValueError):
        parse_allowed_hosts([entry])
