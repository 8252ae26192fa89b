"""Reads prompts with llama.cpp: python llama_cpp_program.py FILE PROMPTS NUM_IDS LETTER.

PROMPTS is a JSON list of texts and of lists of token ids, LETTER the id of a token that is a letter. Prints a JSON list
with the logprobs of all NUM_IDS tokens after each prompt.
"""

import json
import sys
from typing import Any

import xllamacpp


def main() -> None:
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx = 256
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    prompts, num_ids = json.loads(sys.argv[2]), int(sys.argv[3])
    print(json.dumps([logprobs_after(server, prompt, num_ids, sys.argv[4]) for prompt in prompts]))


def logprobs_after(server: Any, prompt: str | list[int], num_ids: int, letter: str) -> list[float]:
    # The bias does not change logprobs. Tokens that are parts of a letter would have none.
    answer = server.handle_completions(
        {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": num_ids, "logit_bias": {letter: 100}}
    )
    (step,) = answer["choices"][0]["logprobs"]["content"]
    row = {top["id"]: top["logprob"] for top in step["top_logprobs"]}
    return [row[token] for token in range(num_ids)]


if __name__ == "__main__":
    main()
