"""The live page as files: who may have them, what they may load, and what the try-it box is told."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from service.routes import dashboard
from tests.service.fake_engine import FakeEngine
from tests.service.harness import error_of, events_of, serving, tokens_of

FILES = sorted(path.name for path in (Path(dashboard.__file__).parents[1] / "dashboard").iterdir())


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize("name", FILES)
async def test_every_file_is_served_with_its_type(name: str):
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}[name.rpartition(".")[2]]
    async with serving() as server:
        response = await server.http.get(f"/dashboard/{name}")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in response.headers["content-security-policy"]


async def test_the_page_and_what_is_not_there():
    async with serving() as server:
        page = await server.http.get("/dashboard")
        assert page.status_code == 200 and "<title>Eyas</title>" in page.text
        for name in ("app.py", "..%2Fapp.py", "%2e%2e/app.py", "index.html/x"):
            error_of(await server.http.get(f"/dashboard/{name}"), 404)


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_elsewhere(name: str):
    text = (Path(dashboard.__file__).parents[1] / "dashboard" / name).read_text()
    urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", text))
    assert urls <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "innerHTML" not in text and "style=" not in text and "onclick" not in text


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/app.js", "/metrics"])
async def test_with_keys_the_page_is_guarded_and_a_browser_can_open_it(path: str):
    async with serving(api_key=("secret", "clé")) as server:
        refused = await server.http.get(path)
        assert error_of(refused, 401)["code"] == "invalid_api_key"
        challenge = refused.headers["www-authenticate"]
        assert challenge.startswith("Basic realm=") if path == "/dashboard" else challenge == "Bearer"
        for allowed in (basic("anyone:secret"), basic(":clé"), "Bearer secret"):
            response = await server.http.get(path, headers={"Authorization": allowed.encode()})
            assert response.status_code == 200


@pytest.mark.parametrize(
    "value",
    ["Basic", "Basic ", basic("secret"), basic("secret:"), basic("a:wrong"), "Basic !!", "Basic c2Vjc"],
)
async def test_a_basic_credential_without_a_key_is_refused(value: str):
    async with serving(api_key=("secret",)) as server:
        error_of(await server.http.get("/dashboard", headers={"Authorization": value}), 401)


async def test_chunks_tell_which_ids_were_accepted_drafts():
    # Steps accept 2, 0, 1 drafts; the cap cuts the last one inside its accepted run.
    accepts = [2, 0, 3]
    engine = FakeEngine(lambda request: tokens_of("abcdefgh"), accepts=lambda step: accepts[step])
    async with serving(engine) as server:
        response = await server.complete(stream=True, return_token_ids=True, logprobs=0, max_tokens=6)
        chunks = [
            choice for event in events_of(response) for choice in event["choices"] if choice["token_ids"]
        ]
        assert [len(choice["token_ids"]) for choice in chunks] == [3, 1, 2]
        assert [choice["num_accepted_tokens"] for choice in chunks] == [2, 0, 2]
        assert [offset for choice in chunks for offset in choice["logprobs"]["text_offset"]] == [
            0,
            1,
            2,
            3,
            4,
            5,
        ]
        plain = await server.complete(stream=True, max_tokens=6)
        assert "num_accepted_tokens" not in plain.text
