"""The dashboard's files, its view of the engine, and access to it. The browser is in e2e/test_dashboard.py."""

import base64
import re

import msgspec
import pytest
from fake_client import FakeClient
from http_client import request
from pooling_fakes import EMBED

from octavo.frontend.dashboard.assets import assets
from octavo.frontend.health import EngineReport
from octavo.protocol.events import EngineFacts
from octavo.protocol.snapshot import BLOCK_CACHED, BLOCK_FREE, BLOCK_USED, EngineSnapshot, RequestProgress, StepSample
from octavo.protocol.stats import EngineStats

KEY = "sesame"


class ShownClient(FakeClient):
    """An engine whose snapshot is known."""

    async def snapshot(self, engine: int) -> EngineSnapshot:
        return EngineSnapshot(
            stats=EngineStats(num_running=1, num_blocks=6, num_free_blocks=4, generation_tokens=7),
            requests=[RequestProgress("r", True, 5, 0, 5, 7, 9, 2, 0, 1.5)],
            blocks=bytes([BLOCK_USED, BLOCK_USED, BLOCK_CACHED, BLOCK_FREE, BLOCK_FREE, BLOCK_FREE]),
            steps=[StepSample(3, 1, 1, 0, 0.25)],
        )


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{key}".encode()).decode()


def get(path: str, **headers: str):
    return request(ShownClient(), "GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})


def test_every_file_that_the_page_names_is_served():
    found = get("/")
    assert found.status_code == 200
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:href|src)="dashboard/([^"]+)"', found.text))
    assert {"app.js", "base.css", "icon.svg"} <= named
    for name, asset in assets().items():
        if name.endswith(".js"):
            named |= set(re.findall(r'from "\./([^"]+)"', asset.body.decode()))
    assert named == assets().keys() - {"index.html"}
    for name in named:
        assert get(f"/dashboard/{name}").status_code == 200


def test_the_page_names_no_other_host_and_has_no_inline_script():
    for name, asset in assets().items():
        text = asset.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn", text), name
        assert not re.search(r"<script(?![^>]*src=)|\son\w+=|innerHTML", text), name
    assert "default-src 'self'" in get("/").headers["content-security-policy"]


def test_a_browser_that_has_a_file_is_not_sent_it_again():
    first = get("/dashboard/app.js")
    again = get("/dashboard/app.js", if_none_match=first.headers["etag"])
    assert (again.status_code, again.content) == (304, b"")
    assert get("/dashboard/app.js", if_none_match='"other"').content == first.content


@pytest.mark.parametrize("path", ["/dashboard/none.js", "/dashboard/..%2fstate.py", "/dashboard/__init__.py"])
def test_only_files_of_the_page_are_served(path):
    assert get(path).status_code == 404


def test_the_state_names_what_the_wire_leaves_unnamed():
    state = get("/dashboard/state").json()
    assert state["blocks"] == [[BLOCK_USED, 2], [BLOCK_CACHED, 1], [BLOCK_FREE, 3]]
    assert state["requests"][0] == {
        "request_id": "r", "is_running": True, "num_prompt_tokens": 5, "num_cached_tokens": 0, "num_computed_tokens": 5,
        "num_output_tokens": 7, "max_tokens": 9, "num_blocks": 2, "num_preemptions": 0, "age_s": 1.5,
    }  # fmt: skip
    assert state["steps"] == [
        {"sequence": 3, "num_requests": 1, "num_decode_tokens": 1, "num_prefill_tokens": 0, "elapsed_s": 0.25}
    ]
    assert state["stats"]["generation_tokens"] == 7
    assert state["engine"]["models"] == ShownClient().facts.served_model_names
    for histogram in state["latencies"].values():
        assert len(histogram["counts"]) == len(histogram["edges"]) + 1


def test_the_state_says_what_a_pooling_model_computes() -> None:
    assert get("/dashboard/state").json()["engine"]["tasks"] == []
    pooling = request(ShownClient(pooling=EMBED), "GET", "/dashboard/state").json()
    assert pooling["engine"]["tasks"][0] == "embed"


class SeveralEngines(ShownClient):
    """Three engines, of which one is down."""

    def engine_reports(self, deadline_s: float = 30.0) -> list[EngineReport]:
        return [EngineReport(0, "down", "it restarts"), EngineReport(2, "up", ""), EngineReport(5, "draining", "")]

    def stats_by_engine(self) -> dict[int, EngineStats]:
        return {0: EngineStats(), 2: EngineStats(num_running=3), 5: EngineStats(num_waiting=1)}

    def facts_by_engine(self) -> dict[int, EngineFacts]:
        return {index: msgspec.structs.replace(self.facts, epoch=10 + index) for index in (0, 2, 5)}

    async def snapshot(self, engine: int) -> EngineSnapshot:
        return msgspec.structs.replace(await super().snapshot(engine), stats=EngineStats(num_steps=100 + engine))


@pytest.mark.parametrize(
    ("query", "shown"), [("", 2), ("?engine=5", 5), ("?engine=0", 2), ("?engine=9", 2), ("?engine=x", 2)]
)
def test_all_engines_are_listed_and_one_is_shown(query: str, shown: int):
    state = request(SeveralEngines(), "GET", f"/dashboard/state{query}").json()
    assert [(row["index"], row["state"], row["reason"]) for row in state["engines"]] == [
        (0, "down", "it restarts"), (2, "up", ""), (5, "draining", ""),
    ]  # fmt: skip
    assert [row["stats"]["num_running"] for row in state["engines"]] == [0, 3, 0]
    assert (state["shown"], state["engine"]["epoch"], state["stats"]["num_steps"]) == (shown, 10 + shown, 100 + shown)


def test_a_page_asks_for_a_password_and_the_api_for_a_token():
    for path, scheme in (("/", "Basic"), ("/dashboard/state", "Basic"), ("/v1/models", "Bearer")):
        rejected = request(ShownClient(), "GET", path, api_keys=(KEY,))
        assert rejected.status_code == 401
        assert rejected.headers["www-authenticate"].startswith(scheme)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": basic(KEY)}, 200),
        ({"authorization": basic(KEY), "sec-fetch-site": "same-origin"}, 200),
        ({"authorization": basic(KEY), "origin": "http://octavo.test"}, 200),
        ({"authorization": f"Bearer {KEY}", "origin": "http://elsewhere.test"}, 200),
        ({"authorization": basic("wrong")}, 401),
        ({"authorization": "Basic ???"}, 401),
        ({"authorization": b"Basic \xe9"}, 401),
        ({"authorization": basic(KEY), "sec-fetch-site": "cross-site"}, 401),
        ({"authorization": basic(KEY), "sec-fetch-site": "same-site"}, 401),
        ({"authorization": basic(KEY), "origin": "http://elsewhere.test"}, 401),
        ({"authorization": basic(KEY), "origin": "null"}, 401),
    ],
)
def test_credentials_sent_by_browsers_are_accepted_only_from_our_page(headers, status):
    assert request(ShownClient(), "GET", "/v1/models", headers=headers, api_keys=(KEY,)).status_code == status
