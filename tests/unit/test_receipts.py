"""Receipts without an engine: the log and its limits, saved answers, and the requests that compute them again."""

import errno
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.frontend.receipts import log as log_module
from octavo.frontend.receipts.compare import compare_answers, compare_fingerprints
from octavo.frontend.receipts.log import ReceiptLog
from octavo.frontend.receipts.receipt import PromptReceipt, Receipt, Record, SequenceReceipt
from octavo.frontend.receipts.saved import CHAT, CHAT_BATCH, COMPLETIONS, SavedAnswer, Unusable, read_answers


def receipt(num_prompts: int = 1, seed: int | None = 1, **fingerprint: str) -> Receipt:
    sequence = SequenceReceipt(index=0, token_ids=[1, 2], logprobs="ab" * 8, digest="cd", finish_reason="stop")
    one = PromptReceipt(prompt="ef", num_prompt_tokens=3, params={}, sequences=[sequence], seed=seed)
    return Receipt.of(fingerprint, [one] * num_prompts)


def record(number: int, size: int = 0) -> Record:
    request = msgspec.Raw(msgspec.json.encode({"prompt": "x" * size}))
    return Record(time=1.0, id=str(number), url=COMPLETIONS, request=request, receipt=receipt())


def written(directory: Path) -> list[str]:
    """Return the ids in the log, once all are written."""
    lines = [line for file in sorted(directory.iterdir()) for line in file.read_text().splitlines()]
    return [json.loads(line)["id"] for line in lines]


def end(log: ReceiptLog) -> None:
    log._thread.shutdown()


def test_the_log_keeps_the_latest_receipts_within_its_limit(tmp_path: Path) -> None:
    log = ReceiptLog(tmp_path, 32_000)
    for number in range(200):
        log.write(record(number, 500))
    end(log)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert sum(sizes) <= 32_000 and max(sizes) <= 2_000, sizes
    assert all(file.stat().st_mode & 0o77 == 0 for file in tmp_path.iterdir()), "it has the requests of others"
    ids = written(tmp_path)
    assert 30 < len(ids) < 200
    assert ids == [str(number) for number in range(200 - len(ids), 200)]


def test_logs_of_one_process_share_a_directory(tmp_path: Path) -> None:
    """A server has one log for each of its joined models; both begin a file in the same second."""
    logs = [ReceiptLog(tmp_path, 32_000) for _ in range(2)]
    for number in range(4):
        logs[number % 2].write(record(number))
    for log in logs:
        end(log)
    assert sorted(written(tmp_path)) == ["0", "1", "2", "3"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_large_receipt_has_a_file_of_its_own_and_a_removed_file_is_replaced(tmp_path: Path) -> None:
    log = ReceiptLog(tmp_path, 16_000)
    for number, size in enumerate((10, 5_000, 10)):
        log.write(record(number, size))
    log._thread.submit(lambda: [file.unlink() for file in tmp_path.iterdir()])
    log.write(record(3))
    end(log)
    assert written(tmp_path) == ["3"]


def test_a_full_disk_loses_receipts_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, room = ReceiptLog(tmp_path, 2**20), [2**20]
    write = os.write

    def limited(fd: int, data: Any) -> int:
        """Write as much as there is room for, as a full disk does."""
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num_bytes = write(fd, data[: room[0]])
        room[0] -= num_bytes
        return num_bytes

    monkeypatch.setattr(log_module.os, "write", limited)
    with caplog.at_level(logging.WARNING):
        log.write(record(0))
        log._thread.submit(lambda: room.__setitem__(0, 100))
        for number in range(1, 4):
            log.write(record(number))
        log._thread.submit(lambda: room.__setitem__(0, 2**20))
        log.write(record(4))
        end(log)
    assert written(tmp_path) == ["0", "4"], "no half lines"
    lost, found = caplog.messages
    assert lost == f"receipts are lost, responses are not: cannot write to {tmp_path}: No space left on device"
    assert found == f"receipts are written to {tmp_path} again; 3 were lost"


def test_receipts_that_wait_for_a_slow_disk_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import threading

    monkeypatch.setattr(log_module, "MAX_WAITING_BYTES", 1000)
    log, is_free = ReceiptLog(tmp_path, 2**20), threading.Event()
    log._thread.submit(is_free.wait)
    for number in range(10):
        log.write(record(number, 400))
    is_free.set()
    end(log)
    assert written(tmp_path) == ["0", "1", "2"]
    assert "1000 bytes of receipts wait for the disk" in caplog.messages[0]


PARTS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"prompt": "a"}, [{"prompt": "a"}]),
    ({"prompt": [1, 2]}, [{"prompt": [1, 2]}]),
    ({"prompt": ["a", [1], ""]}, [{"prompt": "a"}, {"prompt": [1]}, {"prompt": ""}]),
    ({"prompt_embeds": "AA"}, [{"prompt_embeds": "AA"}]),
    (
        {"prompt": ["a"], "prompt_embeds": ["AA", "BB"]},
        [{"prompt_embeds": "AA"}, {"prompt_embeds": "BB"}, {"prompt": "a"}],
    ),
]


@pytest.mark.parametrize(("request_", "parts"), PARTS, ids=lambda value: str(value)[:40])
def test_every_prompt_is_computed_again_with_its_own_seed(
    request_: dict[str, Any], parts: Sequence[dict[str, Any]]
) -> None:
    for seed, sent in ((None, None), (5, 5), (2**64 - 5, -5), (2**63, -(2**63))):
        body = {**request_, "stream": True, "model": "there", "seed": 9, "speculation": 4, "priority": 2, "top_p": 0.5}
        answer = SavedAnswer(name="a", url=COMPLETIONS, request=body, receipt=receipt(len(parts), seed), choices=[])
        assert not answer.fault
        bodies = [json.loads(one) for one in answer.bodies("here")]
        assert [one.pop("seed", None) for one in bodies] == [sent] * len(parts)
        shared = {"top_p": 0.5, "model": "here", "return_receipt": True}
        plain = [{name: value for name, value in one.items() if value is not None} for one in bodies]
        assert plain == [{**shared, **part} for part in parts]


def test_a_batch_of_conversations_is_computed_again_one_by_one(tmp_path: Path) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b")]
    one = msgspec.to_builtins(receipt())
    both = {**one, "prompts": one["prompts"] * 2}
    path = tmp_path / "saved.jsonl"
    path.write_text(json.dumps({"receipt": both, "request": {"messages": conversations}, "url": CHAT_BATCH}))
    (answer,) = read_answers(path)
    assert isinstance(answer, SavedAnswer)
    assert (answer.url, answer.fault) == (CHAT, "")
    assert [json.loads(body)["messages"] for body in answer.bodies(None)] == conversations


def test_lines_that_cannot_be_compared_say_why(tmp_path: Path) -> None:
    good = msgspec.to_builtins(receipt())
    lines = {
        "{": "is not JSON",
        "[]": "is not a JSON object",
        '{"error": {"message": "line 2: wrong"}}': "has no answer: line 2: wrong",
        json.dumps({"receipt": good}): "has no request",
        json.dumps({"receipt": good, "request": {}}): "has no url",
        json.dumps({"receipt": {**good, "prompts": 3}, "request": {}, "url": COMPLETIONS}): "cannot be read: Expected",
        json.dumps({"receipt": good, "request": {"prompt": "a"}, "url": COMPLETIONS}): "",
    }
    path = tmp_path / "saved.jsonl"
    path.write_text("\n".join(lines) + "\n\n")
    answers = list(read_answers(path))
    assert [one.name for one in answers] == [f"{path}:{number}" for number in range(1, len(lines) + 1)]
    for answer, reason in zip(answers, lines.values(), strict=True):
        assert reason in answer.reason if isinstance(answer, Unusable) else not reason, answer


def test_fingerprints_differ_in_parts() -> None:
    own = {"dtype": "float32", "weights": "ab", "processor": "amx_bf16 avx avx2 avx512f fma"}
    assert compare_fingerprints(own, own) is None
    other = {**own, "dtype": "float16", "processor": "avx avx2 avx512f fma", "adapter": "cd"}
    assert compare_fingerprints(other, own) == (
        "dtype is float16 in the receipt, float32 here (--dtype float16); processor is avx avx2 avx512f fma in the "
        "receipt, ... amx_bf16 here; adapter is cd in the receipt, nothing here"
    )


def test_an_engine_whose_bits_depend_on_the_batch_promises_nothing() -> None:
    recorded, computed = receipt(variant_module="conv"), receipt().prompts[0]
    assert compare_answers(recorded, [computed]).outcome == 0
    computed.sequences[0].token_ids[1] = 3
    verdict = compare_answers(recorded, [computed])
    assert verdict.outcome == 2 and "the bits of conv depend on the batch" in verdict.text
    assert compare_answers(receipt(), [computed]).outcome == 1
