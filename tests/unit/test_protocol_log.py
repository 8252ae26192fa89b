"""Where the log goes, and the limit on lines that a hostile peer causes."""

import json
import logging
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from octavo.protocol.errors import ConfigError
from octavo.protocol.log import LimitedLog, configure_logging, log_settings


def test_few_lines_of_a_kind_in_an_interval_and_a_count_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = LimitedLog(logging.getLogger("test"), max_lines=2, interval_s=10.0, clock=lambda: now[0])
    for number in range(5):
        log.warning("line %d", number)
    assert [record.getMessage() for record in caplog.records] == ["line 0", "line 1"]
    now[0] = 10.0
    log.warning("line %d", 5)
    assert [record.getMessage() for record in caplog.records[2:]] == [
        "3 lines like the next one were omitted",
        "line 5",
    ]
    now[0] = 20.0
    log.warning("line %d", 6)
    assert caplog.records[-1].getMessage() == "line 6" and len(caplog.records) == 5


JSON_LINES = {
    "formatters": {"json": {"()": "octavo.protocol.log.JsonLines"}},
    "handlers": {"lines": {"class": "logging.FileHandler", "filename": "", "formatter": "json"}},
    "root": {"handlers": ["lines"]},
}


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Leave `logging` as it was found."""
    root, ours = logging.getLogger(), logging.getLogger("octavo")
    before = root.handlers[:], root.level, ours.handlers[:], ours.level, ours.propagate, logging.getLogRecordFactory()
    yield
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], ours.handlers[:], ours.propagate = before[0], before[2], before[4]
    root.setLevel(before[1])
    ours.setLevel(before[3])
    logging.setLogRecordFactory(before[5])


def json_lines(path: Path) -> str:
    """Return a configuration that logs JSON objects into `path`."""
    handler = {**JSON_LINES["handlers"]["lines"], "filename": str(path)}
    return json.dumps({**JSON_LINES, "handlers": {"lines": handler}})


def test_a_configuration_takes_the_place_of_our_lines(tmp_path: Path, restored_logging: None) -> None:
    existing = logging.getLogger("octavo.existing")
    configure_logging("Worker 3", "INFO", json_lines(tmp_path / "log"))
    existing.debug("left out")
    try:
        raise ZeroDivisionError("oops")
    except ZeroDivisionError:
        existing.exception("said %d\n", 1)
    (line,) = (tmp_path / "log").read_text().splitlines()
    fields = json.loads(line)
    assert datetime.fromisoformat(fields.pop("time")).tzinfo is not None
    assert fields.pop("exception").endswith("ZeroDivisionError: oops")
    assert fields == {
        "level": "ERROR",
        "process": "Worker 3",
        "pid": os.getpid(),
        "logger": "octavo.existing",
        "message": "said 1\n",
    }
    assert log_settings() == ("INFO", json_lines(tmp_path / "log"))
    configure_logging("Worker 3", "WARNING")
    assert log_settings() == ("WARNING", "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "not a JSON object"),
        ('{"handlers": {"x": {"class": "nowhere.Handler"}}}', "Unable to configure handler 'x'.*nowhere"),
        ('{"version": 2}', "Unsupported version"),
        ('{"root": {"handlers": ["missing"]}}', "Unable to configure root logger.*missing"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_told_with_its_cause(config: str, message: str, restored_logging: None) -> None:
    with pytest.raises(ConfigError, match=f"(?s)^log_config_file: .*{message}"):
        configure_logging("Core", "INFO", config)
    assert log_settings()[1] == "", "children must not be told of what was rejected"
