"""The random requests of a run: every parameter whose state a crash could lose, on prompts with shared prefixes."""

import random
from collections.abc import Sequence
from typing import Any

from octavo.frontend.cli.bench.chaos.jobs import ChaosJob, ChaosRequest, ClientBehavior, Kind
from octavo.protocol.pooling import TOKEN_TASKS, PoolingTask

MAX_PROMPT_CHARS = 760
"""Maximum characters of a prompt without the chat template. In the worst case each character is one token."""
MAX_OUTPUT_TOKENS = 64
REQUIRED_MODEL_LEN = 1024
"""Number of tokens that prompt and output need at most."""

SHARE_OF_HTTP = 0.65

MAX_TEXTS = 24
"""Maximum number of texts in one request to a pooling model."""

_VOCABULARY = (
    "the a one of and then but if when river mountain engine token block window garden letter answer "
    "question story quick slow bright seven eleven walks sings breaks returns counts sleeps because under "
    "over between tomorrow"
)
_WORDS = _VOCABULARY.split(" ")

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks it up.", "parameters": _SCHEMA}}
_CHOICES = ["yes", "no", "perhaps tomorrow"]
_REGEX = "[a-f]{2,12}(-[0-9]{1,4})?"


def draw_requests(seed: int, count: int, tasks: Sequence[PoolingTask] = ()) -> list[ChaosRequest]:
    """Return distinct requests, determined by the arguments.

    Args:
        seed: seed of the random choices.
        count: number of requests.
        tasks: the tasks of a pooling model; () for a model that generates.
    """
    rng = random.Random(f"requests {seed}")
    prefixes = [_text(rng, 60), _text(rng, 30), _text(rng, 85)]
    if tasks:
        return [_draw_pooling(rng, number, prefixes, tasks) for number in range(count)]
    return [_draw_request(rng, number, prefixes, seed) for number in range(count)]


def draw_jobs(seed: int, requests: Sequence[ChaosRequest], count: int) -> list[ChaosJob]:
    """Return jobs in random order with random client behavior. Every request occurs about equally often."""
    rng = random.Random(f"jobs {seed}")
    drawn = [requests[number % len(requests)] for number in range(count)]
    rng.shuffle(drawn)
    return [ChaosJob(number, request, _draw_behavior(rng, request)) for number, request in enumerate(drawn)]


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


def _draw_request(rng: random.Random, number: int, prefixes: Sequence[str], seed: int) -> ChaosRequest:
    kind = rng.choice([Kind.COMPLETIONS, Kind.CHAT]) if rng.random() < SHARE_OF_HTTP else Kind.GENERATE
    own = f"{number}: {_text(rng, rng.randrange(1, 25))}"
    prompt = f"{rng.choice(['', *prefixes])} {own}"[-MAX_PROMPT_CHARS:]
    params = _draw_params(rng)
    addressed: dict[str, Any] = {"priority": rng.choice([0, 0, 0, -1, 5])}
    if rng.random() < 0.4:
        addressed["cache_salt"] = rng.choice(["alice", "bob"])
    if rng.random() < 0.7:
        params["seed"] = rng.randrange(2**62)
    else:  # the seed is then derived from the request id
        addressed["request_id"] = f"chaos-{seed}-{number}"
    if kind is Kind.GENERATE:
        return ChaosRequest(number, kind, {"prompt": prompt, **addressed, "params": _of_generate(rng, params)})
    body = {**addressed, **params, "return_token_ids": True}
    if kind is Kind.CHAT:
        turns = [{"role": "system", "content": "Answer in few words."}] if rng.random() < 0.5 else []
        return ChaosRequest(
            number, kind, {"messages": [*turns, {"role": "user", "content": prompt}], **_of_chat(rng, body)}
        )
    return ChaosRequest(number, kind, {"prompt": prompt, **_of_completions(rng, body)})


def _draw_pooling(
    rng: random.Random, number: int, prefixes: Sequence[str], tasks: Sequence[PoolingTask]
) -> ChaosRequest:
    task = rng.choice(tasks)
    num_texts = 1 if task in TOKEN_TASKS else rng.choice([1, rng.randrange(2, MAX_TEXTS + 1)])
    texts = [f"{rng.choice(['', *prefixes])} {number}, {_text(rng, rng.randrange(1, 25))}" for _ in range(num_texts)]
    body: dict[str, Any] = {
        "input": texts,
        "task": task,
        "priority": rng.choice([0, 0, 0, -1, 5]),
        "truncate_prompt_tokens": -1,
    }
    if rng.random() < 0.4:
        body["cache_salt"] = rng.choice(["alice", "bob"])
    if rng.random() < 0.3:
        body["use_activation"] = False
    return ChaosRequest(number, Kind.POOLING if rng.random() < SHARE_OF_HTTP else Kind.POOL, body)


def _draw_params(rng: random.Random) -> dict[str, Any]:
    """Draw parameters that every API supports."""
    is_greedy = rng.random() < 0.3
    params: dict[str, Any] = {
        "temperature": 0.0 if is_greedy else rng.choice([0.6, 1.0, 1.4]),
        "max_tokens": rng.choice([rng.randrange(1, 20), rng.randrange(20, MAX_OUTPUT_TOKENS + 1)]),
    }
    if not is_greedy and rng.random() < 0.2:
        params["n"] = rng.choice([2, 3])
    optional: list[tuple[float, str, list[Any]]] = [
        (0.3, "top_k", [1, 8, 40]),
        (0.3, "top_p", [0.3, 0.9]),
        (0.2, "min_p", [0.05]),
        (0.2, "presence_penalty", [0.8, -0.4]),
        (0.2, "frequency_penalty", [0.6]),
        (0.2, "repetition_penalty", [1.2]),
        (0.25, "stop", [["er"], [" the", "ing"], ["zq", "\n"]]),
        (0.2, "min_tokens", [1]),
        (0.6, "ignore_eos", [True]),
        (0.1, "logit_bias", [{"7": 4.0, "11": -3.0}]),
        (0.1, "bad_words", [["and"]]),
    ]
    for share, name, values in optional:
        value = rng.choice(values)
        if rng.random() < share:
            params[name] = value
    return params


def _of_generate(rng: random.Random, params: dict[str, Any]) -> dict[str, Any]:
    if rng.random() < 0.4:
        params["logprobs"] = rng.choice([0, 3])
    if rng.random() < 0.1:
        params["prompt_logprobs"] = 1
    form = rng.choice([{"choice": _CHOICES}, {"regex": _REGEX}, {"json": _SCHEMA}])
    if rng.random() < 0.2:
        params["structured_outputs"] = form
    elif params["temperature"] and rng.random() < 0.1:
        params["best_of"] = params.get("n", 1) + 2
    return params


def _of_completions(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    if rng.random() < 0.4:
        body["logprobs"] = rng.choice([0, 3])
    chance = rng.random()
    if chance < 0.1 and body["temperature"]:
        body["best_of"] = body.get("n", 1) + 2
    elif chance < 0.2:
        body["structured_outputs"] = rng.choice([{"choice": _CHOICES}, {"regex": _REGEX}])
    elif chance < 0.25:
        body = {name: body[name] for name in ("priority", "return_token_ids", "ignore_eos") if name in body}
        body |= {"use_beam_search": True, "n": 2, "max_tokens": 10, "temperature": 0.0}
    return body


def _of_chat(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    if rng.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": rng.choice([0, 3])}
    chance = rng.random()
    if chance < 0.15:
        schema = {"name": "thing", "schema": _SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif chance < 0.3:
        named = {"type": "function", "function": {"name": "look_up"}}
        body |= {"tools": [_TOOL], "tool_choice": rng.choice(["required", named])}
    if "tools" in body or "response_format" in body:
        body.pop("stop", None)
    return body


def _draw_behavior(rng: random.Random, request: ChaosRequest) -> ClientBehavior:
    is_streamed = request.can_stream and rng.random() < 0.6
    if not is_streamed:
        return ClientBehavior()
    pause_s = rng.choice([0.02, 0.1]) if rng.random() < 0.15 else 0.0
    chance = rng.random()
    pieces = rng.randrange(1, 12)
    if chance < 0.1:
        return ClientBehavior(True, pause_s, leaves_after=pieces)
    # Aborts select by request id, and another client may use the same id.
    if chance < 0.15 and not request.is_http and "request_id" not in request.body:
        return ClientBehavior(True, pause_s, aborts_after=pieces)
    return ClientBehavior(True, pause_s)
