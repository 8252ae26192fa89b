"""Batches with requests or results at a URL, against a local server."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from waiting import join

from octavo.frontend.batch import remote
from octavo.frontend.cli import run_batch
from octavo.frontend.cli.errors import CommandError


class Store(BaseHTTPRequestHandler):
    """Holds files by their paths."""

    files: dict[str, bytes]

    def do_GET(self) -> None:
        data = self.files.get(self.path)
        self.send_response(404 if data is None else 200)
        self.end_headers()
        self.wfile.write(data or b"")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        taken = "no" not in self.path
        if taken:
            self.files[self.path] = data
        self.send_response(201 if taken else 403)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def store() -> Iterator[tuple[str, dict[str, bytes]]]:
    files: dict[str, bytes] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Store,), {"files": files}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", files
    server.shutdown()
    join(thread)
    server.server_close()


def test_requests_are_fetched_with_a_limit(store, monkeypatch: pytest.MonkeyPatch) -> None:
    url, files = store
    files["/in"] = b"x" * 10
    monkeypatch.setattr(remote, "MAX_INPUT_BYTES", 10)
    assert remote.fetch(f"{url}/in").read() == b"x" * 10
    files["/in"] += b"x"
    with pytest.raises(CommandError, match="has more than"):
        remote.fetch(f"{url}/in")
    with pytest.raises(CommandError, match="HTTP 404"):
        remote.fetch(f"{url}/nothing")
    with pytest.raises(CommandError, match="cannot fetch"):
        remote.fetch("http://127.0.0.1:1/x")


def test_results_go_to_their_url_or_stay(store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, files = store
    monkeypatch.chdir(tmp_path)
    # Every line is wrong, and its result there already: no engine is needed.
    files["/in"] = b"nonsense\n"
    result = '{"id":"batch_req_1","custom_id":null,"response":null,"error":{"code":"invalid_line","message":"x"}}\n'
    for path in ("/no", "/out"):
        Path(remote.local_name(url + path)).write_text(result)
    words = ["M", "-i", f"{url}/in", "-o"]
    with pytest.raises(CommandError, match="HTTP 403") as rejected:
        run_batch.run([*words, f"{url}/no"])
    assert remote.local_name(f"{url}/no") in rejected.value.hint
    assert run_batch.run([*words, f"{url}/out"]) == 0
    assert files["/out"] == result.encode()
    assert [path.name for path in tmp_path.iterdir()] == [remote.local_name(f"{url}/no")]
