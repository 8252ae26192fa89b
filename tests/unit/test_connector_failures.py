"""Connectors of users that raise, return nonsense, never return, or must forget: no request is lost or wrong."""

import os
import random
import select
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from connector_fakes import Memory, engine_with, memory, submit_of, wait_ready
from core_fakes import CLIENT, FakeEngine, alone
from waiting import wait_until

from octavo.core_proc.file_store import FileStore
from octavo.core_proc.transfer.plugin import PluginConnector
from octavo.protocol.kv_connector import ConnectorRequest, KVBlock, content_key
from octavo.protocol.worker_commands import LoadBlocks
from octavo.worker_proc.cache.block_loader import BlockLoader
from octavo.worker_proc.cache.connector_store import ConnectorStore

PROMPT = [1] * 33


class SlowMemory(Memory):
    """Does not return from a question before it is told to."""

    has_begun: threading.Event
    may_return: threading.Event

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> int:
        self.has_begun.set()
        assert self.may_return.wait(60)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


@pytest.fixture
def slow() -> Iterator[SlowMemory]:
    fast = memory()
    plugin = SlowMemory(fast.config, fast.role)
    plugin.has_begun, plugin.may_return = threading.Event(), threading.Event()
    yield plugin
    plugin.may_return.set()


def keys_of(prompt: list[int]) -> list[bytes]:
    """Return the keys of the blocks of a prompt."""
    other = FakeEngine(16, kv_offloading_path="/files")
    other.submit("first", prompt)
    other.run()
    return [key for key, states in other.files.items() if states is not None][: (len(prompt) - 1) // 4]


def is_readable(waker: PluginConnector | BlockLoader) -> bool:
    return bool(select.select([waker.fileno()], [], [], 0)[0])


def test_an_answer_that_is_read_before_its_thread_writes_wakes_the_core_once(monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, written, write = threading.Event(), threading.Event(), os.eventfd_write

    def write_later(fd: int, value: int) -> None:
        assert may_write.wait(60)
        write(fd, value)
        written.set()

    monkeypatch.setattr(os, "eventfd_write", write_later)
    _, connector = engine_with(memory())
    connector.submit(CLIENT, submit_of("a", PROMPT))
    wait_ready(connector)
    may_write.set()
    assert written.wait(60)
    assert is_readable(connector)
    assert connector.take_ready() == []
    assert not is_readable(connector)
    connector.close()


def test_a_transfer_that_is_taken_before_its_callback_writes_wakes_the_worker_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = SimpleNamespace(num_staging_rows=0, first_staging_row=0, load=lambda pairs: None)
    loader = BlockLoader(cast(Any, host))
    write, deferred = os.eventfd_write, threading.Event()
    monkeypatch.setattr(os, "eventfd_write", lambda fd, value: deferred.set())
    loader.load(LoadBlocks(7, [], [], ""), cast(Any, SimpleNamespace(wait=lambda: None)))
    assert deferred.wait(60)
    assert [transfer.sequence for transfer in loader.take_finished()] == [7]
    write(loader.fileno(), 1)
    assert loader.take_finished() == []
    assert not is_readable(loader)
    loader.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ValueError("broken"), "ValueError: broken"),
        ((8, True), "TypeError: 'tuple' object"),
        (None, "'NoneType' object"),
    ],
)
def test_a_request_whose_question_fails_is_computed(
    answer: Any, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = memory()

    def answer_badly(request: ConnectorRequest, num_computed_tokens: int) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(plugin, "get_num_new_matched_tokens", answer_badly)
    engine, connector = engine_with(plugin)
    connector.submit(CLIENT, submit_of("unlucky", PROMPT))
    ((_, submit),) = wait_ready(connector)
    output = engine.submit(submit.request_id, list(submit.prompt_token_ids))
    engine.run()
    assert output.num_cached_tokens == 0 and output.token_ids == alone(PROMPT).token_ids
    (line,) = caplog.messages
    assert line.startswith("KV connector Memory: get_num_new_matched_tokens failed, request unlucky is computed: ")
    assert message in line
    connector.close()


class Index:
    """An integer as NumPy has them."""

    def __index__(self) -> int:
        return 8


def test_any_integer_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = memory()
    monkeypatch.setattr(plugin, "get_num_new_matched_tokens", lambda request, num: Index())
    engine, connector = engine_with(plugin)
    connector.submit(CLIENT, submit_of("a", PROMPT))
    wait_ready(connector)
    assert engine.scheduler.cache.files is not None and len(engine.scheduler.cache.files) == 2
    connector.close()


def test_requests_do_not_wait_for_a_connector_that_never_answers(
    slow: SlowMemory, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]
    _, connector = engine_with(slow, timeout_s=60.0, clock=lambda: now_s[0])
    for name in ("first", "second", "aborted"):
        assert connector.submit(CLIENT, submit_of(name, PROMPT)) == []
    connector.abort(CLIENT, ["aborted"])
    assert slow.has_begun.wait(60)
    assert connector.take_ready() == []
    now_s[0] = 60.0
    assert [submit.request_id for _, submit in connector.take_ready()] == ["first", "second"]
    assert "has not answered for 60 s (--execute-model-timeout), 2 requests are computed" in caplog.text
    third = submit_of("third", PROMPT)
    assert connector.submit(CLIENT, third) == third
    assert connector.num_waiting == 0
    slow.may_return.set()
    wait_until(lambda: connector.submit(CLIENT, submit_of("fourth", PROMPT)) == [])
    wait_until(lambda: [name for name, _ in slow.asked] == ["first", "fourth"])
    connector.close()


def test_a_connector_that_never_returns_does_not_keep_the_core_alive(
    slow: SlowMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("octavo.core_proc.transfer.plugin.CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr("octavo.core_proc.transfer.plugin.MAX_QUEUED_CALLS", 2)
    _, connector = engine_with(slow)
    connector.submit(CLIENT, submit_of("a", PROMPT))
    assert slow.has_begun.wait(60)
    connector.note_ended([str(number) for number in range(10)])
    assert "does not return from its calls, request_finished is omitted" in caplog.text
    connector.close()
    assert "the core ends without waiting for it" in caplog.text


def test_what_must_be_forgotten_is_not_loaded_although_it_was_found(slow: SlowMemory) -> None:
    keys = keys_of(PROMPT)
    slow.contents = {content_key("here", key): b"" for key in keys}
    engine, connector = engine_with(slow)
    files = engine.scheduler.cache.files
    assert files is not None
    connector.submit(CLIENT, submit_of("early", PROMPT))
    connector.delete(keys[:2])
    slow.may_return.set()
    wait_ready(connector)
    assert set(keys) - {key for key in keys if key in files} == set(keys[:2])
    # After `forget`, an answer counts again: another engine may have saved the contents anew.
    wait_until(lambda: not connector.take_ready() and not connector._discarded)
    assert slow.forgotten == [content_key("here", key) for key in keys[:2]]
    connector.submit(CLIENT, submit_of("late", PROMPT))
    wait_ready(connector)
    assert all(key in files for key in keys)
    connector.close()


def test_what_a_connector_fails_to_forget_is_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(keys: Sequence[str]) -> None:
        raise OSError("read-only")

    plugin, keys = memory(), keys_of(PROMPT)
    plugin.contents = {content_key("here", key): b"" for key in keys}
    monkeypatch.setattr(plugin, "forget", fail)
    engine, connector = engine_with(plugin)
    connector.delete(keys[:2])
    connector.submit(CLIENT, submit_of("late", PROMPT))
    wait_ready(connector)
    files = engine.scheduler.cache.files
    assert files is not None
    assert [key in files for key in keys] == [False] * 2 + [True] * (len(keys) - 2)
    connector.close()


def test_engines_that_save_nothing_forget_too() -> None:
    plugin = memory()
    engine, connector = engine_with(plugin)
    store = FileStore(engine.scheduler, engine, "here", cast(Any, connector), 1000, saves=False)
    engine._transfers.append(store)
    files = engine.scheduler.cache.files
    assert files is not None
    engine.submit("a", PROMPT)
    engine.run()
    assert not engine.files, "nothing is saved"
    files.discard(b"\1")
    store.on_step()
    assert files.discarded == []
    wait_until(lambda: plugin.forgotten == ["here/01"])
    connector.close()


def test_the_connector_learns_of_every_end() -> None:
    plugin = memory()
    _, connector = engine_with(plugin)
    connector.note_ended(["finished", "failed"])
    wait_until(lambda: plugin.finished == ["finished", "failed"])
    connector.close()


def test_workers_load_what_was_saved_and_miss_what_fails(caplog: pytest.LogCaptureFixture) -> None:
    plugin = memory()
    store = ConnectorStore(plugin)
    room = [bytearray(3), bytearray(3)]
    assert store.write_all("here", [(b"a", memoryview(b"abc"))]) == [True]
    contents = [(key, memoryview(buffer)) for key, buffer in zip((b"a", b"b"), room, strict=True)]
    assert store.read_all("here", contents) == [True, False]
    assert store.read_all("elsewhere", contents[:1]) == [False]
    assert room[0] == b"abc"
    plugin.error = OSError("no connection")
    assert store.read_all("here", contents) == [False, False]
    assert caplog.messages == [
        "KV connector Memory: start_load_kv failed, 2 blocks will be computed: OSError: no connection"
    ]
    store.close()


class LateMemory(Memory):
    """Raises after it has begun, and writes or reads later."""

    begun: list[Sequence[KVBlock]]
    fails_to_wait = False

    def start_load_kv(self, blocks: Sequence[KVBlock]) -> None:
        self.begun.append(blocks)
        raise OSError("some have begun")

    def wait_for_load(self) -> list[str]:
        if self.fails_to_wait:
            raise OSError("lost")
        for _, content in self.begun[-1]:
            content[:] = b"new"
        return []

    def save_kv(self, blocks: Sequence[KVBlock]) -> None:
        self.begun.append(blocks)

    wait_for_save = wait_for_load


def test_buffers_are_used_again_only_after_the_connector_has_let_go_of_them() -> None:
    fast = memory()
    plugin = LateMemory(fast.config, fast.role)
    plugin.begun = []
    store = ConnectorStore(plugin)
    row = bytearray(b"old")
    assert store.read_all("here", [(b"a", memoryview(row))]) == [False]
    plugin.fails_to_wait = True
    assert store.read_all("here", [(b"b", memoryview(row))]) == [False]
    assert store.write_all("here", [(b"b", memoryview(row))]) == [False]
    store.read_all("here", [(b"c", memoryview(row))])
    store.write_all("here", [(b"c", memoryview(row))])
    for blocks in plugin.begun:
        for _, content in blocks:
            content[:] = b"bad"
    assert row == b"old"
    first, second, saved, third, saved_later = [blocks[0][1].obj for blocks in plugin.begun]
    assert first is second, "the first wait has returned"
    assert second is not third and saved is not saved_later


class SharedFiles(Memory):
    """Finds what simulated workers have saved."""

    files: dict[bytes, Any]

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> int:
        self.contents = {
            content_key("here", key): b"" for key, states in list(self.files.items()) if states is not None
        }
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def forget(self, keys: Sequence[str]) -> None:
        for key in [key for key in self.files if content_key("here", key) in keys]:
            del self.files[key]
        super().forget(keys)


@pytest.mark.parametrize("saves", [True, False])
def test_random_requests_give_the_tokens_of_each_alone_whatever_is_lost_or_forgotten(saves: bool) -> None:
    rng, made = random.Random(int(saves)), memory()
    plugin = SharedFiles(made.config, made.role)
    engine, connector = engine_with(plugin)
    plugin.files = engine.files
    store = FileStore(engine.scheduler, engine, "here", cast(Any, connector), 1000, saves=saves)
    engine._transfers.append(store)
    files = engine.scheduler.cache.files
    assert files is not None
    num_loaded = 0
    for number in range(40):
        prompt = [rng.choice([1, 2])] * rng.randrange(2, 40)
        if not saves:
            other = FakeEngine(16, kv_offloading_path="/files")
            other.submit("other", prompt)
            other.run()
            engine.files.update(other.files)
        for key in rng.sample(sorted(engine.files), min(2, len(engine.files))):
            if rng.random() < 0.5:
                engine.files.pop(key)  # lost: the connector may have promised it
            else:
                files.discard(key)
        store.on_step()
        wait_until(lambda: not connector.take_ready() and not connector._discarded)
        given = submit_of(f"r{number}", prompt)
        if connector.submit(CLIENT, given) == []:
            wait_ready(connector)
        output = engine.submit(given.request_id, prompt)
        engine.run()
        num_loaded += engine.scheduler.counters.external_prefix_cache_hits
        assert output.token_ids == alone(prompt).token_ids
        engine.scheduler.reset_prefix_cache()
    assert num_loaded and plugin.forgotten
    connector.close()
