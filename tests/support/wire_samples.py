"""One message of every kind that crosses a socket, with the codec that carries it."""

from octavo.protocol import codec, events, requests, steps
from octavo.protocol.params import SamplingSpec
from octavo.protocol.stats import EngineStats, RequestTimings

SPEC = SamplingSpec(max_tokens=5, seed=2**64 - 1, stop_token_ids=(3,), logit_bias=((1, -2.5),))
LOGPROBS = events.TokenLogprobs([4, 4, 9], [-0.1, -0.1, -2.0], 1)
FACTS = events.EngineFacts(1, "path", ["name"], 100, 50, 16, 10, 8, 20, "float32", "cpu", b"config", "pulse")

MESSAGES = [
    (codec.request_codec(), requests.Connect(client="test")),
    (codec.request_codec(), requests.Submit("r", [1, 2], SPEC, 3, "salt", None, [7])),
    (codec.request_codec(), requests.Abort(["a", "b"])),
    (codec.request_codec(), requests.Call(1, requests.StartProfile("dir"))),
    (codec.request_codec(), requests.Call(2, requests.ResetPrefixCache())),
    (codec.event_codec(), events.Welcome(FACTS)),
    (codec.event_codec(), events.Refused("no")),
    (
        codec.event_codec(),
        events.Events(
            1,
            [
                events.Tokens("r", [4], [LOGPROBS], [None, LOGPROBS], 16),
                events.Finished("r", events.FinishReason.STOP, 3, 16, 1, RequestTimings(1.0, 2.0, 3.0, 4.0)),
                events.Failed("s", events.FailureKind.INVALID, "too long", "prompt"),
            ],
        ),
    ),
    (codec.event_codec(), events.Reply(1, EngineStats(num_running=2))),
    (codec.event_codec(), events.Reply(1, events.CallFailed("no"))),
    (codec.event_codec(), events.StatsReport(EngineStats(num_blocks=4, num_free_blocks=3))),
    (codec.event_codec(), events.EngineDying("cause")),
    (
        codec.worker_command_codec(),
        steps.StepPlan(
            0,
            [1],
            [steps.Admitted(0, "r", [1, 2], 2, [5], SPEC)],
            [steps.Appended(2, [6])],
            [steps.Scheduled(0, 0, 2, True)],
        ),
    ),
    (codec.worker_command_codec(), steps.AllocateCache(0, 10, 100)),
    (codec.worker_command_codec(), steps.Profile(0, None)),
    (codec.worker_command_codec(), steps.Stop(0)),
    (codec.worker_reply_codec(), steps.StepResult(0, [4], [LOGPROBS], [(0, [LOGPROBS])], 0.5)),
    (codec.worker_reply_codec(), steps.CommandFailed(0, 0, "ValueError", "bad", "trace")),
]
