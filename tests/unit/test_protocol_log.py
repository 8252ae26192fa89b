"""Log lines that a hostile peer causes must not fill the log."""

import logging

import pytest

from octavo.protocol.log import LimitedLog


def test_few_lines_of_a_kind_in_an_interval_and_a_count_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = LimitedLog(logging.getLogger("test"), max_lines=2, interval_s=10.0, clock=lambda: now[0])
    for number in range(5):
        log.warning("line %d", number)
    assert [record.getMessage() for record in caplog.records] == ["line 0", "line 1"]
    now[0] = 10.0
    log.warning("line %d", 5)
    assert [record.getMessage() for record in caplog.records[2:]] == [
        "3 lines like the next one were left out",
        "line 5",
    ]
    now[0] = 20.0
    log.warning("line %d", 6)
    assert caplog.records[-1].getMessage() == "line 6" and len(caplog.records) == 5
