"""At least one message of every kind that crosses a socket, with the codec that carries it."""

from octavo.protocol import (
    adapters,
    admin,
    codec,
    events,
    media,
    prompt_embeds,
    requests,
    snapshot,
    steps,
    weights,
    worker_commands,
)
from octavo.protocol.alignment import AlignmentSpec
from octavo.protocol.buffers import Buffer
from octavo.protocol.ids import pack_ids
from octavo.protocol.kv_transfer import KVTransfer
from octavo.protocol.params import PoolingSpec, SamplingSpec
from octavo.protocol.repetition import RepetitionSpec
from octavo.protocol.speech_rules import SpeechRules
from octavo.protocol.stats import EngineStats, RequestTimings
from octavo.protocol.structured import GrammarKind, GrammarPart, GrammarSpec

SPEC = SamplingSpec(max_tokens=5, seed=2**64 - 1, stop_token_ids=(3,), logit_bias=((1, -2.5),))
FULL_SPEC = SamplingSpec(
    max_tokens=5,
    seed=7,
    temperature=0.5,
    top_k=40,
    top_p=0.9,
    min_p=0.1,
    presence_penalty=0.25,
    frequency_penalty=-0.25,
    repetition_penalty=1.5,
    min_tokens=2,
    eos_token_ids=(1, 2),
    stop_token_ids=(3,),
    logprobs=4,
    prompt_logprobs=5,
    logit_bias=((1, -2.5),),
    skip_reading_prefix_cache=True,
    allowed_token_ids=(1, 2, 3),
    bad_words=((4,), (5, 6)),
    logprobs_mode="processed_logits",
    repetition=RepetitionSpec(1, 8, 3),
    logprob_token_ids=(9,),
    extra_args={"target": [1, 2.5, "x", None]},
    speculation=4,
    prompt_logprob_token_ids=((5,), (), (6, 7)),
    prompt_logprob_start=2,
    speech_rules=SpeechRules((1, 2), (3,), 4, 5, 6),
)
GRAMMAR = GrammarSpec(
    GrammarKind.JSON_SCHEMA, "{}", "tools", b"<t>", (GrammarPart("response_format", "{}"),), 100, (7, 8), (b"<u>",)
)
_GROUP = weights.TransferGroup("10.0.0.1", 29500, 1, 3, "nccl", 30.0)
_TRANSFER = weights.Transfer("cd34", [weights.TensorShape("model.norm.weight", "bfloat16", [64])])
LOGPROBS = events.TokenLogprobs([4, 4, 9], [-0.1, -0.1, -2.0], 1)
FACTS = events.EngineFacts(
    *(1, "path", ["name"], 100, 50, 16, 10, 8, 20, "float32", "cpu", b"config", "pulse", 4, "same", "ab12"),
    identity_parts={"dtype": "float32"},
)
TIMINGS = RequestTimings(1.0, 2.0, 3.0, 4.0)
STATS = EngineStats(num_running=2, num_blocks=4, num_free_blocks=3, worker_failures={"died": 1})
LARGE = bytes(range(256)) * (codec.MIN_BUFFER_BYTES // 256)
"""Long enough to be sent as a buffer frame."""
POOLED = events.PooledOutput(Buffer(b"1234"), (1,), "float32")
LARGE_POOLED = events.PooledOutput(Buffer(LARGE), (4, 4096), "float32")
MANY_IDS = pack_ids(range(codec.MIN_BUFFER_BYTES))

ADAPTER = adapters.Adapter("sql", "ab" * 32, "/adapters/sql", 16)
EMBEDS = prompt_embeds.PromptEmbeds.pack([(0, 17), (18, 1)], LARGE[: 18 * 8])
PIXELS = {"pixel_values": media.MediaTensor("float32", [1, 2], Buffer(LARGE))}
IMAGE = media.MediaItem([(1, 3), (5, 1)], media.digest_of(PIXELS), PIXELS)
GRID = media.MediaItem([(1, 6)], media.digest_of(PIXELS), PIXELS, [1, 2, 3])
VIDEO = media.MediaItem([(1, 6)], media.digest_of(PIXELS), PIXELS, [3, 1, 2], kind="video", frame_step=1.5)
FRAME = media.MediaItem(
    [(7, 2)], media.digest_of(PIXELS), PIXELS, [1, 1, 2], kind="video", frame_step=1.5, continues_grid=True
)
AUDIO = media.MediaItem([], media.digest_of(PIXELS), PIXELS, attended_rows=50, kind="audio")
_REQUESTS = [
    requests.Connect(client="test", frontend_id=b"id"),
    requests.Submit("r", pack_ids([1, 2]), SPEC, 3, "salt", None, pack_ids([7])),
    requests.Submit("r", pack_ids([300, 2**31 - 1]), FULL_SPEC, -1, None, ADAPTER, pack_ids(), 32, GRAMMAR, True),
    requests.Submit("long", MANY_IDS, SPEC, resume_output_token_ids=MANY_IDS),
    requests.Submit("embeds", pack_ids([0] * 20), SPEC, prompt_embeds=EMBEDS),
    requests.Submit("image", pack_ids([0] * 8), SPEC, media=[IMAGE]),
    requests.Submit("grid", pack_ids([0] * 8), SPEC, media=[GRID]),
    requests.Submit("video", pack_ids([0] * 8), SPEC, media=[VIDEO, FRAME]),
    requests.Submit("pooled", pack_ids([1]), PoolingSpec("embed")),
    requests.Submit("steps", pack_ids([1]), PoolingSpec("token_classify", "step", False, 0, 7, (1, 2), 3, True)),
    requests.Submit("align", pack_ids([1, 2]), AlignmentSpec(((0, 1), (1, 0)), 1, 40, 5), media=[AUDIO]),
    requests.Submit("prefill", pack_ids([1]), SPEC, kv_transfer=KVTransfer(leaves=True)),
    requests.Submit(
        "decode", pack_ids([1]), SPEC, kv_transfer=KVTransfer(False, True, "e", "0" * 32, "10.0.0.1", 5, 64)
    ),
    requests.ModelVocabulary([b"a", b"\xff", b""], [2]),
    requests.Abort(["a", "b"]),
    requests.Call(1, requests.StartProfile("dir")),
    requests.Call(2, requests.ResetPrefixCache()),
    requests.Call(3, requests.StopProfile()),
    requests.Call(4, requests.GetStats()),
    requests.Call(5, requests.GetSnapshot()),
    requests.Call(6, weights.PauseGeneration("keep", False)),
    requests.Call(7, weights.ResumeGeneration()),
    requests.Call(8, weights.UpdateWeights("ab12", "/weights", "step 1", True, "continue", False)),
    requests.Call(8, weights.UpdateWeights("ab12", "", "step 2", transfer=_TRANSFER)),
    requests.Call(8, weights.UpdateWeights("ab12", "/weights", is_check=True)),
    requests.Call(8, weights.HoldSteps(False)),
    requests.Call(8, weights.InitWeightTransfer(_GROUP)),
    requests.Call(9, weights.Sleep(2, "wait")),
    requests.Call(10, weights.WakeUp(["weights"])),
    requests.Call(11, weights.GetWeights()),
    requests.WatchCache(1),
]
_EVENTS = [
    events.Welcome(FACTS),
    events.Refused("no"),
    events.Events(
        1,
        [
            events.StreamedTokens(["a", "b"], [300, 7], [0, 16]),
            events.Tokens("r", [4], [LOGPROBS], [None, LOGPROBS], 16, [0.5]),
            events.Finished("r", events.FinishReason.STOP, 3, 16, 1, TIMINGS),
            events.Failed("s", events.FailureKind.INVALID, "too long", "prompt"),
        ],
        2.5,
    ),
    events.Events(
        1,
        [
            events.Finished("p", events.FinishReason.STOP, result=POOLED),
            events.Finished("q", events.FinishReason.STOP, result=LARGE_POOLED),
        ],
    ),
    events.Reply(1, STATS),
    events.Reply(1, events.CallFailed("no")),
    events.Reply(1, events.BoolResult(True)),
    events.Reply(1, weights.WeightsStatus(2, "step 2", True, 1, ["kv_cache"], "why")),
    events.FactsChanged("same", "ab12", 2, "step 2"),
    events.Reply(
        1,
        snapshot.EngineSnapshot(
            STATS,
            [snapshot.RequestProgress("r", True, 1, 2, 3, 4, 5, 6, 7, 8.0)],
            b"\x00\x01",
            [snapshot.StepSample(1, 2, 3, 4, 0.5)],
        ),
    ),
    events.StatsReport(EngineStats(num_blocks=4, num_free_blocks=3)),
    events.CacheUpdate(1, 1, 3, True, 2, Buffer(bytes(range(16))), Buffer(b"")),
    events.EngineDying("cause"),
]
_COMMANDS = [
    steps.StepPlan(
        0,
        [1],
        [steps.Admitted(0, "r", pack_ids([1, 2]), 2, [[5]], SPEC)],
        [steps.Appended(2, [[6]])],
        [steps.Scheduled(0, 0, 2, 1), steps.Scheduled(2, 16, 8, 0)],
    ),
    steps.StepPlan(1, [], [], [], [steps.Scheduled(0, 2, 4, 4)], awaits_masks=True),
    steps.StepPlan(
        2,
        [],
        [steps.Admitted(0, "r", pack_ids([1]), 1, [[5]], SPEC, adapter_slot=1)],
        [],
        [steps.Scheduled(0, 0, 1, 1)],
        adapter_loads=[adapters.AdapterLoad(1, ADAPTER)],
    ),
    steps.StepPlan(
        3,
        [],
        [steps.Admitted(0, "r", pack_ids([0, 0, 1]), 3, [[5]], SPEC, embed_spans=[(0, 2)])],
        [],
        [steps.Scheduled(0, 0, 3, 1)],
        prompt_embeds=prompt_embeds.StepEmbeds([(0, 0, 2)], Buffer(b"12345678")),
    ),
    steps.StepPlan(
        4, [], [], [], [steps.Scheduled(0, 2, 3, 3)], sampled=[(0, 7), (0, 8)], draft_tokens=[(0, pack_ids([5, 6]))]
    ),
    steps.StepPlan(5, [], [], [], [steps.Scheduled(0, 2, 1, 1)], copies_out=[(5, 0), (6, 3)], copies_in=[(1, 5)]),
    steps.StepPlan(6, [], [], [], [steps.Scheduled(0, 2, 1, 1)], num_drafts=3),
    steps.StepPlan(9, [], [], [], [steps.Scheduled(0, 2, 4, 4)], num_steps=4),
    steps.StepPlan(
        7,
        [],
        [],
        [],
        [steps.Scheduled(0, 0, 4, 0)],
        media=media.StepMedia(
            [bytes(32)], [media.EncoderInput(IMAGE.digest, 4, PIXELS)], [(0, 1, 3, 0, 0)], [IMAGE.digest]
        ),
    ),
    steps.StepPlan(
        8,
        [],
        [],
        [],
        [steps.Scheduled(0, 2, 1, 1)],
        state_copies_out=[(3, 0)],
        state_copies_in=[(1, 3)],
    ),
    steps.StepPlan(
        7, [], [], [], [steps.Scheduled(0, 2, 2, 2)], draft_tokens=[(0, pack_ids([5]))], state_moves=[(0, 4, 9)]
    ),
    steps.TokenMasks.pack(2, [(0, 0, b"\x01\x00\x00\x80"), (0, 1, b"\xff\xff\xff\xff")]),
    steps.TokenMasks.pack(3, [(slot, 0, LARGE[: 2**15]) for slot in range(4)]),
    worker_commands.LoadBlocks(6, [(5, 0)], [(1, 4)], [(2, 3), (3, 9)]),
    worker_commands.LoadBlocks(7, from_files=[(b"\xab" * 32, 4)], folder="/kv/1"),
    worker_commands.LoadBlocks(7, folder="/kv/1", states_from_files=[(b"\xab" * 32 + b"\x01", 2)]),
    worker_commands.StoreBlocks(8, [(5, b"\xab" * 32)], "/kv/1"),
    worker_commands.StoreBlocks(9, [(3, b"\xab" * 32 + b"\x01")], "/kv/1", are_states=True),
    worker_commands.AllocateCache(0, [10], 100),
    worker_commands.AllocateCache(0, [10], 100, 7),
    worker_commands.WarmUp(1),
    worker_commands.Profile(0, None),
    worker_commands.LoadWeights(1, "/weights", True, True),
    worker_commands.LoadWeights(1, "", transfer=_TRANSFER),
    worker_commands.JoinWeightTransfer(2, _GROUP),
    worker_commands.ReleaseMemory(2, 1),
    worker_commands.RestoreWeights(3),
    worker_commands.SaveBlockFiles(4, "/dev/shm/blocks", [7, 2]),
    worker_commands.SaveBlockFiles(4, "/dev/shm/blocks", [7, 2], [1]),
    worker_commands.LoadBlockFiles(5, "/dev/shm/blocks", [(1, 9)]),
    worker_commands.LoadBlockFiles(5, "/dev/shm/blocks", [(1, 9)], [(0, 3)], 2),
    worker_commands.StopWorker(0),
]
_REPLIES = [
    steps.StepResult(0, pack_ids([4]), [LOGPROBS], [(0, [LOGPROBS])], 0.5),
    steps.StepResult(1, pack_ids([4, 5, steps.NO_TOKEN]), [], [], 0.5, [2, 1]),
    steps.StepResult(2, pack_ids([steps.NO_TOKEN]), [], [], 0.5, faults=[steps.StepFault(3, "raised", "extra_args")]),
    steps.StepResult(3, pack_ids([4]), [], [], adapter_faults=[adapters.AdapterFault(1, "ab", "r: too large")]),
    steps.StepResult(4, pack_ids([steps.POOLED]), [], [], pooled=[POOLED]),
    worker_commands.BlocksLoaded(6, 1, [9], 0.25),
    worker_commands.BlocksLoaded(6, 1, [], 0.25, [2]),
    steps.StepResult(5, pack_ids([4]), [], [], drafts=[(0, pack_ids([5, 6]))], drafts_s=0.25, idle_s=0.5),
    steps.StepResult(6, pack_ids([4]), [], [], earlier_drafts=[(1, pack_ids([7]))]),
    worker_commands.CacheReady(0, 1),
    worker_commands.WarmedUp(1, 0, 2.5, 83, 2**28),
    worker_commands.Acknowledged(0, 1, "the disk is full", "ab12"),
    worker_commands.CommandFailed(0, 0, "ValueError", "bad", "trace"),
]
_ADMIN_CALLS = [
    requests.Call(12, admin.ListRequests(5)),
    requests.Call(13, admin.AbortRequests(["a"])),
    requests.Call(14, admin.AbortRequests(None)),
    requests.Call(15, admin.DrainEngine(False)),
    requests.Call(16, admin.SetLogLevel("DEBUG")),
]
_ADMIN_RESULTS = [
    events.Reply(12, admin.RequestRows([admin.RequestRow("a", "ab12", "running", 1, 2, 3, 4, 5, 6.0)], 7, True)),
    events.Reply(13, admin.RequestCount(2)),
]

MESSAGES = [
    *((codec.request_codec(), message) for message in _REQUESTS),
    *((codec.event_codec(), message) for message in _EVENTS),
    *((codec.worker_command_codec(), message) for message in _COMMANDS),
    *((codec.worker_reply_codec(), message) for message in _REPLIES),
    *((codec.request_codec(), message) for message in _ADMIN_CALLS),
    *((codec.event_codec(), message) for message in _ADMIN_RESULTS),
]
