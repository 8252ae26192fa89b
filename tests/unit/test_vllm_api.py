"""vLLM's names on octavo, without an engine."""

import argparse
import asyncio
import logging
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from metrics_fakes import exporter

from octavo.compat import vllm
from octavo.compat.vllm.engine_args import changed
from octavo.compat.vllm.engine_view import plain
from octavo.compat.vllm.metrics import snapshot
from octavo.compat.vllm.names import NAMES
from octavo.compat.vllm.pooling import PoolingLLM
from octavo.compat.vllm.prompts import as_dict, tokenized
from octavo.compat.vllm.request_outputs import FlatLogprobs, request_output
from octavo.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.protocol import params as own
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.logits_processor import BatchUpdate, MoveDirectionality
from octavo.protocol.pooling_params import PoolingParams
from octavo.protocol.stats import EngineStats, RequestTimings

SamplingParams = vllm.SamplingParams


def test_every_name_of_the_table_is_there() -> None:
    for module, names in NAMES.items():
        found = import_module(module.replace("vllm", "octavo.compat.vllm", 1))
        assert [name for name in names if not hasattr(found, name)] == [], module


def test_modules_are_attributes_and_share_their_classes() -> None:
    from octavo.compat.vllm.v1.engine.async_llm import AsyncLLM

    assert AsyncLLM is vllm.AsyncLLMEngine is vllm.engine.async_llm_engine.AsyncLLMEngine
    assert vllm.version.__version__ == vllm.__version__ == "0.32.0"


@pytest.mark.parametrize("module", ["octavo.compat.vllm.multimodal", "octavo.compat.vllm.v1.worker.gpu"])
def test_a_module_that_is_missing_says_where_the_others_are_listed(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"octavo has no vllm\..*docs/vllm-compatibility.md"):
        import_module(module)
    assert not hasattr(vllm, "ModelRegistry")


def test_a_variable_without_a_known_default_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = import_module("octavo.compat.vllm.envs")
    assert envs.VLLM_LOGGING_LEVEL == "INFO" and envs.VLLM_API_KEY is None
    with pytest.raises(AttributeError, match="VLLM_FLASH_ATTN_VERSION"):
        _ = envs.VLLM_FLASH_ATTN_VERSION
    monkeypatch.setenv("VLLM_FLASH_ATTN_VERSION", "3")
    assert envs.VLLM_FLASH_ATTN_VERSION == 3


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    (tmp_path / "script.py").write_text(
        "import sys, vllm, vllm.envs as envs\n"
        "from beside import WORD\n"
        "from vllm.sampling_params import RequestOutputKind\n"
        "print(vllm.SamplingParams(2).n, RequestOutputKind.DELTA.name, WORD, sys.argv[1:], __name__)\n"
        "print(envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE)\n"
    )
    for words in (["script.py"], ["-m", "script"]):
        command = [sys.executable, "-P", "-m", "octavo.compat.vllm", *words, "-a", "b"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stdout.splitlines() == ["2 DELTA beside ['-a', 'b'] __main__", "5"], done.stderr


def test_parameters_are_positional_in_vllms_order() -> None:
    params = SamplingParams(2, 0.1, 0.2, 1.1, 0.7, None, 0.9, 5, 0.01, -1, "stop", [7, 7])
    assert (params.n, params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (
        2,
        0.1,
        0.2,
        1.1,
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.7, 0.9, 5, 0.01, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["stop"], [7], [])
    ours = params.octavo(max_tokens=3)
    assert (ours.n, ours.top_k, ours.stop, ours.bad_words, ours.max_tokens) == (2, 5, ["stop"], None, 3)
    assert SamplingParams().output_kind is vllm.sampling_params.RequestOutputKind.CUMULATIVE
    assert SamplingParams(logprobs=True).num_logprobs == 1
    assert SamplingParams(logprob_token_ids=[3, 4]).num_logprobs == 2
    beams = vllm.sampling_params.BeamSearchParams(4, 8)
    assert (beams.beam_width, beams.max_tokens) == (4, 8)


def test_parameters_are_cloned_and_updated() -> None:
    params = SamplingParams(stop=["a"], extra_args={"x": [1]})
    copy = params.clone()
    copy.stop.append("b")
    copy.extra_args["x"].append(2)
    assert (params.stop, params.extra_args) == (["a"], {"x": [1]})
    params.update_from_generation_config({"eos_token_id": [1, 2]}, 1)
    assert params.stop_token_ids == [2]
    assert SamplingParams.from_optional(temperature=None, max_tokens=4) == SamplingParams(max_tokens=4)
    scored = SamplingParams(prompt_logprob_token_ids=np.array([[1, -1], [2, 3]]), prompt_logprob_start=1).octavo()
    assert (scored.prompt_logprob_token_ids, scored.prompt_logprob_start) == ([[1, -1], [2, 3]], 1)
    ours = own.SamplingParams(temperature=0.5, max_tokens=9)
    assert SamplingParams.of(ours) == SamplingParams(temperature=0.5, max_tokens=9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("watermarking", True),
        ("thinking_token_budget", 0),
        ("thinking_token_budget", 5),
        ("trace_decode_token_ids", [1]),
    ],
)
def test_parameters_that_octavo_lacks_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"octavo has no {field}: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_outputs_have_vllms_methods_and_order() -> None:
    rows = [{3: Logprob(-0.5, 1, "a"), 4: Logprob(-1.5, 2, "b")}, {5: Logprob(-0.1, 1, "c")}]
    sequence = CompletionOutput(0, "ac", [3, 5], -0.6, rows, "length")
    times = [RequestTimings(1.0, 1.5, 2.0, 3.0)]
    ours = RequestOutput("7", "p", [1], [sequence], True, [None, rows[0]], num_cached_tokens=1, timings=times)
    output = request_output(ours, is_flat=True)
    (found,) = output.outputs
    assert found.finished() is True and vllm.CompletionOutput(0, "", [], None, None).finished() is False
    assert list(found.logprobs) == rows and found.logprobs[0] == rows[0] and list(found.logprobs[1:]) == rows[1:]
    assert list(output.prompt_logprobs) == [{}, rows[0]] and output.num_cached_tokens == 1
    assert output.metrics.num_generation_tokens == 2
    assert (output.metrics.first_token_latency, output.metrics.last_token_ts) == (1.0, 3.0)
    assert request_output(ours).outputs[0].logprobs is rows
    again = vllm.RequestOutput("7", "p", [1], None, [found], True, None, "adapter")
    assert (again.outputs, again.finished, again.lora_request) == ([found], True, "adapter")


def test_flat_logprobs_only_grow() -> None:
    flat = FlatLogprobs.of([{1: Logprob(-1.0)}])
    for change in (lambda: flat.insert(0, None), lambda: flat.__setitem__(0, None), lambda: flat.__delitem__(0)):
        with pytest.raises(TypeError):
            change()
    flat.append(None)
    assert len(flat) == 2 and (flat.start_indices, flat.end_indices) == ([0, 1], [1, 1])


def parsed(*words: str) -> argparse.Namespace:
    parser = vllm.EngineArgs.add_cli_args(vllm.utils.argparse_utils.FlexibleArgumentParser(description="x"))
    parser.set_defaults(model="M", enforce_eager=True)
    parser.add_argument("--port", type=parser.check_port)
    return parser.parse_args(words)


def test_engine_args_are_flags_and_fields() -> None:
    args = parsed("--max_num_seqs", "4", "-dp=2", "--structured-outputs-config.backend", "guidance", "--port", "8000")
    assert (args.data_parallel_size, args.tensor_parallel_size, args.port) == (2, 1, 8000)
    engine_args = vllm.EngineArgs.from_cli_args(args)
    expected = {
        "model": "M",
        "max_num_seqs": 4,
        "data_parallel_size": 2,
        "enforce_eager": True,
        "structured_outputs_config": '{"backend": "guidance"}',
    }
    assert engine_args.settings() == changed(asdict(engine_args)) == expected
    assert vllm.EngineArgs("N", max_model_len=8).settings() == {"model": "N", "max_model_len": 8}
    assert vllm.AsyncEngineArgs(model="N", enable_log_requests=True).settings()["enable_log_requests"] is True
    with pytest.raises(TypeError, match="no_such_setting"):
        vllm.EngineArgs(no_such_setting=1)


def test_a_port_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--port", "80")
    assert "from 1024 to 65535" in capsys.readouterr().err


def test_configuration_objects_become_plain() -> None:
    pooler = vllm.config.PoolerConfig(task="embed", dimensions=32)
    given = {"pooler_config": pooler, "hf_overrides": {"max_model_len": 64, "rope_theta": 1.0}}
    expected = {"pooler_config": {"task": "embed", "dimensions": 32}, "hf_overrides": {"rope_theta": 1.0}}
    assert plain(given) == {**expected, "max_model_len": 64}
    assert plain({**given, "max_model_len": 8})["max_model_len"] == 8


class FakeClient:
    """Tokenizes into the positions of letters."""

    max_model_len = 6
    tokenizer_path: str | None = None

    def __init__(self) -> None:
        self.tokenizer = self.facts = self.config = self.model = self

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) - 96 for letter in text]

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.encode(text, add_special_tokens)

    async def run_in_thread(self, work):
        return work()


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ("abc", None, [0, 1, 2, 3]),
        ("abc", {"add_special_tokens": False}, [1, 2, 3]),
        ("abc", {"truncate_prompt_tokens": 2}, [0, 1]),
        ("abc", {"truncate_prompt_tokens": 2, "truncation_side": "left"}, [2, 3]),
        ("abcdefgh", {"truncation": True}, [0, 1, 2, 3, 4]),
        ("abcdefgh", {"truncate_prompt_tokens": -5}, [0, 1, 2, 3, 4]),
        ("abc", {"truncate_prompt_tokens": 0, "truncation_side": "left"}, []),
        ("abc", {"truncate_prompt_tokens": 0}, []),
        ([1, 2, 3], {"truncation": True, "max_length": 1}, [1]),
        ({"prompt": "abc", "prompt_token_ids": [9]}, None, [9]),
    ],
)
def test_prompts_are_tokenized_and_cut(prompt: object, options: dict | None, expected: list[int]) -> None:
    assert asyncio.run(tokenized(FakeClient(), prompt, options))["prompt_token_ids"] == expected


def test_prompts_are_cut_on_the_side_of_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"truncation_side": "left"}')
    client = FakeClient()
    client.tokenizer_path = str(tmp_path)
    cut = {"truncate_prompt_tokens": 2}
    assert asyncio.run(tokenized(client, "abc", cut))["prompt_token_ids"] == [2, 3]
    assert asyncio.run(tokenized(client, "abc", {**cut, "truncation_side": "right"}))["prompt_token_ids"] == [0, 1]


def test_pooling_reads_the_same_options() -> None:
    llm = object.__new__(PoolingLLM)
    llm.client = FakeClient()
    assert llm._truncating(None, {}) is None
    for options, expected in (
        ({"truncation": True, "max_length": 3}, (3, "right")),
        ({"truncation": True, "truncate_prompt_tokens": 2, "max_length": 3}, (2, "right")),
        ({"truncate_prompt_tokens": -5, "truncation_side": "left"}, (-1, "left")),
        ({"truncation_side": "left", "max_length": 3}, (None, "left")),
    ):
        for params in (None, [PoolingParams()]):
            found = llm._truncating(params, options)
            one = found[0] if params else found
            assert (one.truncate_prompt_tokens, one.truncation_side) == expected
    with pytest.raises(InvalidRequestError, match="add_special_tokens is not supported for pooling"):
        llm._truncating(None, {"add_special_tokens": False})


@pytest.mark.parametrize("options", [{"truncate_prompt_tokens": "5"}, {"truncation_side": "middle"}])
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(InvalidRequestError, match="tokenization_kwargs: trunc"):
        asyncio.run(tokenized(FakeClient(), "a", options))


def test_loggers_log_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = vllm.logger.init_logger("once")
    with caplog.at_level(logging.DEBUG, "once"):
        for name in ("debug_once", "info_once", "warning_once", "warning_once"):
            getattr(logger, name)("%s parsers", 2)
        vllm.logger.init_logger("once").warning_once("%s parsers", 3, scope="local")
    messages = [(record.levelname, record.getMessage(), record.filename) for record in caplog.records]
    levels = ["DEBUG", "INFO", "WARNING"]
    here = "test_vllm_api.py"
    assert messages == [*((level, "2 parsers", here) for level in levels), ("WARNING", "3 parsers", here)]


def test_prompts_and_options_that_octavo_lacks_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a prompt has encoder_prompt, which octavo does not support"):
        as_dict({"prompt": "a", "encoder_prompt": "b"})
    assert as_dict({"prompt": "a", "multi_modal_data": None, "cache_salt": "s"}) == {"prompt": "a", "cache_salt": "s"}
    with pytest.raises(InvalidRequestError, match="padding is not supported"):
        asyncio.run(tokenized(FakeClient(), "a", {"padding": True}))


def test_metrics_are_objects_under_vllms_names() -> None:
    assert snapshot(exporter(num_engines=0)) == []
    metrics = exporter()
    metrics.on_engine_stats(EngineStats(num_running=2, generation_tokens=5))
    metrics.on_first_token(0.5)
    found = {one.name: one for one in snapshot(metrics)}
    assert found["vllm:num_requests_running"].value == 2.0
    assert type(found["vllm:generation_tokens"]).__name__ == "Counter" and found["vllm:generation_tokens"].value == 5
    first = found["vllm:time_to_first_token_seconds"]
    assert (first.count, first.sum, first.buckets["+Inf"]) == (1, 0.5, 1)
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos"].values[0] == 0


def test_state_of_processors_follows_the_batch() -> None:
    update = vllm.v1.sample.logits_processor.builtin.process_dict_updates
    states = {0: "a", 1: "b", 2: "c"}
    added = [(1, own.SamplingParams(extra_args={"x": "new"}), None, []), (2, own.SamplingParams(), None, [])]
    moved = [(0, 3, MoveDirectionality.UNIDIRECTIONAL), (1, 3, MoveDirectionality.SWAP)]
    batch = BatchUpdate(3, removed=[], added=added, moved=moved)
    assert update(states, batch, lambda params, prompt, output: (params.extra_args or {}).get("x"))
    assert states == {3: "new", 1: "a"}
    assert not update(states, None, lambda *_: "never")
