"""Command lines and keyword arguments that were written for vLLM."""

import json
import logging

import pytest
from source_tree import ROOT

from octavo.frontend.cli.argv import normalize_argv
from octavo.frontend.cli.flags import configurations, read_config_file
from octavo.frontend.cli.serve import parser, read_settings
from octavo.frontend.reasoning.registry import reasoning_parser
from octavo.protocol.config.sources import engine_config, engine_fields, server_fields
from octavo.protocol.config.vllm_compat import VLLM_SETTINGS
from octavo.protocol.errors import ConfigError

FLAGS = [
    flag
    for line in (ROOT / "tests/support/vllm_serve_flags.txt").read_text().splitlines()
    if not line.startswith("#")
    for flag in line.split()
]


def configured(line: str):
    """Return what a command line makes of the engine and the server."""
    return configurations(read_settings(line.split()))


def test_every_flag_of_vllm_has_a_meaning_or_a_reason() -> None:
    known = {flag for action in parser()._actions for flag in action.option_strings}
    assert [flag for flag in FLAGS if flag not in known] == []
    assert len(FLAGS) > 250


def test_a_setting_is_ours_or_foreign() -> None:
    ours = {name for info in (*engine_fields(), *server_fields()) for name in (info.name, *info.aliases)}
    assert not ours & VLLM_SETTINGS.keys()
    assert all(setting.why for setting in VLLM_SETTINGS.values())


def test_a_command_line_of_vllm_runs() -> None:
    engine, server = configured(
        "M --max_num_seqs 4 --enforce-eager -tp 1 -pp 1 -O3 --trust-remote-code --gpu-memory-utilization=0.5 "
        "--enable-prompt-tokens-details --distributed-executor-backend mp --structured-outputs-config.backend guidance "
        "--compilation-config.mode 3 --speculative-config {} --uvicorn-log-level warning --cpu-offload-gb 0 "
        "--disable-log-stats --limit-mm-per-prompt.image 0"
    )
    assert engine.scheduler.max_num_seqs == 4
    assert engine.structured.structured_outputs_config == '{"backend": "guidance"}'
    assert server.log_level == "warning"


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("M --enable-tower-connector-lora", "in PEFT's format", "leave out --enable-tower-connector-lora"),
        ("M --no-enable-chunked-prefill", "it is always on", "leave out --no-enable-chunked-prefill"),
        ("M --profiler-config.profiler cuda", "no profiler 'cuda'", "--torch-profiler-dir"),
        ("M --profiler-config []", "not a JSON object", "--torch-profiler-dir"),
    ],
)
def test_what_is_not_here_is_rejected_with_its_reason(line: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(line)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_reasoning_config_with_the_marks_of_the_parsers_is_accepted() -> None:
    marks = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    assert {reasoning_parser(name).marks for name in ("deepseek_r1", "qwen3")} == {tuple(marks.values())}
    configured(f"M --reasoning-config {json.dumps(marks, separators=(',', ':'))}")
    configured("M --reasoning-config.reasoning_end_str </think>")
    for other in ('{"reasoning_end_str":"I_must_answer.</think>"}', "[]x", '{"reasoning_end_str":[]}'):
        with pytest.raises(ConfigError, match="the marks are those of --reasoning-parser"):
            configured(f"M --reasoning-config {other}")


def test_a_setting_without_effect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="octavo"):
        engine_config({"model": "M", "performance_mode": "throughput"})
    assert "--performance-mode has no effect" in caplog.text


def test_profiles_by_the_other_name() -> None:
    _, server = configured('M --profiler-config {"profiler":"torch","torch_profiler_dir":"/tmp/x"}')
    assert server.torch_profiler_dir == "/tmp/x"


def test_keyword_arguments_and_files_likewise(tmp_path) -> None:
    assert engine_config({"model": "M", "use_tqdm_on_load": True, "model_impl": "vllm"}).model.model == "M"
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is a setting of the server"):
        engine_config({"model": "M", "otlp_traces_endpoint": "http://x"})
    path = tmp_path / "config.yaml"
    path.write_text("model: M\nenable-moe-shared-loras: true\n")
    with pytest.raises(ConfigError, match="in PEFT's format"):
        configurations(read_config_file(str(path)))


def test_vllms_own_flags_are_not_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["--help"])
    assert "--performance-mode" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--a_b", "c_d"], ["--a-b", "c_d"]),
        (["--a_b=c_d"], ["--a-b=c_d"]),
        (["--a.b_c", "1", "--a.d.e=x", "m"], ["m", "--a", '{"b_c": 1, "d": {"e": "x"}}']),
        (["--a.b", "1", "--a.b.c", "2"], ["--a", '{"b": {"c": 2}}']),
        (["--a.b", "--c", "1"], ["--a.b", "--c", "1"]),
        (["--a.b=", "--a.c"], ["--a.c", "--a", '{"b": ""}']),
        (["./m.gguf", "--rate=0.5", "-x.y"], ["./m.gguf", "--rate=0.5", "-x.y"]),
    ],
)
def test_words_in_our_spelling(words: list[str], expected: list[str]) -> None:
    assert normalize_argv(words) == expected
