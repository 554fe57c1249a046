"""`/v1/files` over HTTP: what is kept, listed, refused and forgotten."""

from __future__ import annotations

import httpx

from fleet_ingress.testing import open_rig


async def upload(http: httpx.AsyncClient, content: bytes, purpose: str = "batch", **data: str) -> httpx.Response:
    return await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": purpose, **data})


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def test_uploads_are_checked_and_capped() -> None:
    limits = {"max_file_bytes": 2048, "max_files_per_tenant": 2, "max_file_bytes_per_tenant": 3000}
    async with open_rig(**limits) as rig, httpx.AsyncClient(base_url=rig.url) as http:
        refused = [
            error_of(await upload(http, b"x", "fine-tune")),
            error_of(await upload(http, b"")),
            error_of(await upload(http, b"x" * 2049)),
            error_of(await upload(http, b"x" * 200_000)),
            error_of(await http.post("/v1/files", data={"purpose": "batch"}, files={"other": b"x"})),
            error_of(await http.post("/v1/files", files={"file": ("a", b"x")})),
            error_of(await http.post("/v1/files", json={})),
            error_of(
                await upload(http, b"x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"})
            ),
        ]
        expiring = await upload(
            http, b"x" * 2000, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        )
        too_much = error_of(await upload(http, b"x" * 1001))
        await upload(http, b"x")
        too_many = error_of(await upload(http, b"x"))

    assert refused == [
        (400, "invalid_value", "purpose"),
        (400, "empty_file", "file"),
        (413, "request_too_large", None),
        (413, "request_too_large", None),
        (400, "missing_required_parameter", "file"),
        (400, "missing_required_parameter", "purpose"),
        (415, "unsupported_media_type", None),
        (400, "invalid_value", "expires_after[seconds]"),
    ]
    assert expiring.json()["expires_at"] == expiring.json()["created_at"] + 3600
    assert [too_much[:2], too_many[:2]] == [(429, "rate_limit_exceeded")] * 2


async def test_files_are_read_listed_and_deleted() -> None:
    async with open_rig() as rig, httpx.AsyncClient(base_url=rig.url) as http:
        ids = [(await upload(http, f"content {number}".encode(), "user_data")).json()["id"] for number in range(3)]
        content = await http.get(f"/v1/files/{ids[1]}/content")
        first = (await http.get("/v1/files", params={"limit": 2})).json()
        rest = (await http.get("/v1/files", params={"limit": 2, "after": first["last_id"]})).json()
        oldest = (await http.get("/v1/files", params={"order": "asc", "limit": 1})).json()
        none = (await http.get("/v1/files", params={"purpose": "batch"})).json()
        bad = [
            error_of(await http.get("/v1/files", params=params))
            for params in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "file-nope"})
        ]
        deleted = (await http.delete(f"/v1/files/{ids[1]}")).json()
        gone = [
            error_of(await http.get(f"/v1/files/{ids[1]}")),
            error_of(await http.get(f"/v1/files/{ids[1]}/content")),
            error_of(await http.delete(f"/v1/files/{ids[1]}")),
        ]

    assert (content.content, content.headers["x-content-type-options"]) == (b"content 1", "nosniff")
    assert ([item["id"] for item in first["data"]], first["has_more"]) == ([ids[2], ids[1]], True)
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == ([ids[0]], False)
    assert [item["id"] for item in oldest["data"]] == [ids[0]]
    assert none == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert bad == [(400, "invalid_value", param) for param in ("limit", "limit", "order", "after")]
    assert deleted == {"id": ids[1], "object": "file", "deleted": True}
    assert gone == [(404, "file_not_found", "id")] * 3
