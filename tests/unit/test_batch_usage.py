"""`Batch.usage` from answers of every API."""

import json

from octavo.frontend.batch.usage import batch_usage


def test_all_apis_count() -> None:
    answers = [
        {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4},
         "completion_tokens_details": {"reasoning_tokens": 2}},
        {"input_tokens": 7, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 1},
         "output_tokens_details": {"reasoning_tokens": 1}},
        {"input_tokens": 2, "cache_read_input_tokens": 6, "output_tokens": 1},
        {"prompt_tokens": 9, "total_tokens": 9},
        None,
    ]  # fmt: skip
    lines = [json.dumps({"id": "x", "response": {"status_code": 200, "body": {"usage": one}}}) for one in answers]
    lines += [json.dumps({"response": None, "error": {"code": "c"}}), '{"response": {"body": {"error": {}}}}']
    usage = batch_usage(line.encode() for line in lines)
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (10 + 7 + 8 + 9, 9, 43)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (11, 3)
