"""`LLM`: outputs in the order of the prompts, and no process left however the program ends."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import wait_until

from octavo import LLM, SamplingParams
from octavo.protocol.errors import EngineDeadError, InvalidRequestError, StartupError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[5, 6, 7], [8] * 100, [9], list(range(40))]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished and len(output.outputs[0].token_ids) == 6 for output in outputs)
    for prompt, output in zip(prompts, outputs, strict=True):
        (single,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert single.outputs[0].token_ids == output.outputs[0].token_ids


def test_one_prompt_may_stand_alone(llm: LLM) -> None:
    for prompt in ("hello", [1, 2, 3], {"prompt": "hello"}):
        assert len(llm.generate(prompt, GREEDY, use_tqdm=False)) == 1


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [GREEDY.clone(max_tokens=count) for count in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(InvalidRequestError, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)


def test_priorities_are_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    with pytest.raises(InvalidRequestError, match="0 entries for 1 prompts"):
        llm.generate("one", params, priority=[])
    for call in (
        lambda: llm.generate(["one", "two"], params, priority=1),
        lambda: llm.chat([{"role": "user", "content": "one"}], params, priority=1),
    ):
        with pytest.raises(InvalidRequestError, match="--scheduling-policy priority"):
            call()


def test_a_bad_prompt_fails_the_call_and_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        llm.generate([[1], [10**6], [2]], GREEDY.clone(max_tokens=200), use_tqdm=False)
    stats = llm.stats()
    while stats.num_running or stats.num_waiting:
        stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert llm.client.num_live_requests == 0


def test_more_prompts_and_sequences_than_the_engine_queues(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.llm.MAX_IN_FLIGHT", 30)
    with LLM(str(model), dtype="float32", max_model_len=256, max_num_queued_reqs=40, max_num_seqs=4) as narrow:
        outputs = narrow.generate([[number] for number in range(200)], GREEDY.clone(max_tokens=1), use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[number] for number in range(200)]
        several = narrow.generate([[number] for number in range(30)], SamplingParams(n=8, max_tokens=1), use_tqdm=False)
        assert [len(output.outputs) for output in several] == [8] * 30


def test_the_prefix_cache_is_used_and_can_be_reset(llm: LLM) -> None:
    prompt = list(range(200, 264))
    llm.generate([prompt], GREEDY, use_tqdm=False)
    (second,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert second.num_cached_tokens == 48, "all full blocks but the last, of which one token must be computed"
    assert llm.reset_prefix_cache()
    (third,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert third.num_cached_tokens == 0
    assert third.outputs[0].token_ids == second.outputs[0].token_ids


def test_chat_renders_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
    assert output.prompt == "<|user|>\nhello<|turn_end|>\n<|assistant|>\n"
    assert len(llm.chat([[{"role": "user", "content": str(n)}] for n in range(3)], GREEDY, use_tqdm=False)) == 3


def test_another_chat_template(llm: LLM) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (output,) = llm.chat([{"role": "user", "content": "abc"}], GREEDY, use_tqdm=False, chat_template=template)
    assert output.prompt == "abc"
    assert output.prompt_token_ids == llm.get_tokenizer().encode("abc", add_special_tokens=False)


def test_a_profile(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile(str(tmp_path / "traces"))
    llm.generate([[5]], llm.get_default_sampling_params().clone(max_tokens=2), use_tqdm=False)
    llm.stop_profile()
    assert list((tmp_path / "traces").iterdir())


def test_a_progress_bar_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err


def test_token_ids_need_no_tokenizer(llm: LLM, model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        if (model / name).exists():
            (tmp_path / name).symlink_to(model / name)
    (expected,) = llm.generate([[5, 6, 7]], GREEDY.clone(logprobs=2), use_tqdm=False)
    with LLM(str(tmp_path), dtype="float32", max_model_len=256, skip_tokenizer_init=True) as bare:
        (found,) = bare.generate([[5, 6, 7]], GREEDY.clone(logprobs=2), use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="skip-tokenizer-init"):
            bare.generate("text", GREEDY, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="skip-tokenizer-init"):
            bare.chat([{"role": "user", "content": "text"}], GREEDY, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="get_tokenizer needs a tokenizer"):
            bare.get_tokenizer()
        with pytest.raises(InvalidRequestError, match="stop needs a tokenizer"):
            bare.generate([5], GREEDY.clone(stop=["a"]), use_tqdm=False)
    ours, theirs = found.outputs[0], expected.outputs[0]
    assert (ours.token_ids, ours.cumulative_logprob) == (theirs.token_ids, theirs.cumulative_logprob)
    assert ours.text == ""
    assert {entry.decoded_token for position in ours.logprobs or () for entry in position.values()} == {None}


def test_an_unknown_setting_is_rejected(model: Path) -> None:
    with pytest.raises(StartupError, match="max_num_sequences"):
        LLM(str(model), max_num_sequences=4)


def test_closing_answers_callers_in_other_threads(model: Path) -> None:
    llm = LLM(str(model), dtype="float32", max_model_len=1024)
    with ThreadPoolExecutor() as threads:
        params = GREEDY.clone(max_tokens=1000, ignore_eos=True)  # some seconds, so that all are alive at once
        calls = [threads.submit(llm.generate, [[1, 2]] * 50, params, use_tqdm=False) for _ in range(3)]
        wait_until(lambda: llm.client.num_live_requests >= 150)
        llm.close()
        for call in calls:
            with pytest.raises(EngineDeadError, match="closed"):
                call.result(timeout=120)
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a", GREEDY)


def test_the_collector_may_end_an_engine_on_its_own_thread(model: Path) -> None:
    llm = LLM(str(model), dtype="float32", max_model_len=256)
    engine, thread, finalizer = llm.client.engine, llm._thread, llm._finalizer
    assert engine is not None
    llm._loop.call_soon_threadsafe(finalizer)
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert not Path(f"/proc/{engine.core_pid}").exists()


@pytest.mark.parametrize(
    "endings",
    [
        ["", "llm.close(); llm.close()"],
        pytest.param(["del llm", "raise SystemExit(0)"], marks=pytest.mark.long),
    ],
    ids=["short", "long"],
)
def test_a_program_that_just_ends_ends_cleanly_and_repeats_itself(model: Path, endings: list[str]) -> None:
    """However it ends; and without seeds, each run draws the same tokens."""

    def run(ending: str) -> str:
        program = textwrap.dedent(f"""
            from octavo import LLM, SamplingParams
            llm = LLM({str(model)!r}, dtype="float32", max_model_len=256, seed=5)
            outputs = llm.generate(["a", "b"], SamplingParams(temperature=1.0, max_tokens=8), use_tqdm=False)
            print([output.outputs[0].token_ids for output in outputs])
            {ending}
        """)
        environment = {**os.environ, "OCTAVO_LOG_LEVEL": "ERROR"}
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, f"{ending}: {done.stderr}"
        assert "Traceback" not in done.stderr
        assert "rror" not in done.stderr
        return done.stdout

    with ThreadPoolExecutor() as threads:
        printed = list(threads.map(run, endings))
    assert printed[0].startswith("[[") and len(set(printed)) == 1
