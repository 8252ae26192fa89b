"""Access and isolation of tenants: keys on every route, caches separated by salt."""

import msgspec
import pytest
from core_fakes import FakeEngine
from fake_client import FakeClient
from http_client import request
from hypothesis import given
from hypothesis import strategies as st

from octavo.core_proc.snapshot import take_snapshot
from octavo.frontend.http.router import create_router

OPEN = {"/health", "/ping"}
TABLE = [(*route.methods, route.path) for route in create_router(FakeClient()).routes]
TABLE += [("GET", path) for path in ("/", "/dashboard/state", "/dashboard/{name}")]
TABLE += [("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/no/such/route")]


@pytest.mark.parametrize(("method", "path"), TABLE)
def test_every_route_but_the_probes_wants_a_key(method: str, path: str) -> None:
    path = path.partition("{")[0] + ("x" if "{" in path else "")
    response = request(FakeClient(), method, path, api_keys=["secret"])
    assert (response.status_code == 401) == (path not in OPEN)
    wrong = request(FakeClient(), method, path, api_keys=["secret"], headers={"authorization": "Bearer secre"})
    assert wrong.status_code == response.status_code


def common_prefix(first: list[int], second: list[int]) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


PROMPTS = st.lists(st.integers(1, 2), min_size=5, max_size=14)
SALTS = st.sampled_from([None, "", "a", "b", "a\0", "ab"])


@given(requests=st.lists(st.tuples(PROMPTS, SALTS), min_size=2, max_size=12))
def test_no_request_finds_what_another_salt_has_computed(requests: list[tuple[list[int], str | None]]) -> None:
    engine = FakeEngine(num_blocks=256)
    for index, (prompt, salt) in enumerate(requests):
        output = engine.submit(str(index), prompt, 2, cache_salt=salt)
        engine.run()
        own = [len(prompt) and common_prefix(prompt, earlier) for earlier, other in requests[:index] if other == salt]
        assert output.num_cached_tokens <= max(own, default=0)
        assert output.end.num_cached_tokens == output.num_cached_tokens


def test_snapshots_contain_neither_salts_nor_text() -> None:
    engine = FakeEngine()
    engine.submit("r", [7] * 9, 20, cache_salt="very-secret-tenant")
    engine.submit("s", [7] * 9, 20, cache_salt="other-secret-tenant")
    for _ in range(3):
        engine.turn()
    shown = take_snapshot(engine.scheduler, engine.scheduler.stats(), 5.0)
    assert len(shown.requests) == 2
    assert b"secret" not in msgspec.json.encode(shown)
    assert b"secret" not in msgspec.json.encode(engine.scheduler.stats())
    fields = {name for progress in shown.requests for name in progress.__struct_fields__}
    assert not fields & {"cache_salt", "prompt", "prompt_token_ids", "token_ids", "text"}
    engine.run()
