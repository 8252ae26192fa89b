"""`octavo collect-env`: what it shows, and what it masks."""

import json

import pytest

from octavo.frontend.cli import main
from octavo.frontend.cli.collect_env import MASK, mask
from octavo.kernels.native.isa import OTHER_LEVELS, X86_LEVELS


def test_report_names_what_matters(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "a-very-secret-key")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("UNRELATED", "x")
    assert main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert report["packages"]["torch"].startswith("2.")
    assert "pytest" not in report["packages"]
    assert report["native kernels"]["level"].split(",")[0] in [level.name for level in (*X86_LEVELS, *OTHER_LEVELS)]
    assert report["processor"]["usable"][0].isdecimal()
    assert report["environment"]["OCTAVO_API_KEY"] == MASK and report["environment"]["HF_HUB_OFFLINE"] == "1"
    assert "UNRELATED" not in report["environment"]
    assert "a-very-secret-key" not in text


def test_report_for_people_has_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "native kernels:" in lines and any(line.startswith("  msgspec  ") for line in lines)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "x", MASK),
        ("OCTAVO_API_KEY", "", ""),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("HF_HOME", "/data/hf", "/data/hf"),
        ("OCTAVO_NOTE", "hf_abcdefghijklmnop", MASK),
        ("OCTAVO_NOTE", "0123456789abcdef0123456789abcdef", MASK),
        ("https_proxy", "http://me:pass@proxy:3128", f"http://{MASK}@proxy:3128"),
        ("https_proxy", "http://proxy:3128", "http://proxy:3128"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
    ],
)
def test_secrets_are_masked(name: str, value: str, shown: str) -> None:
    assert mask(name, value) == shown
