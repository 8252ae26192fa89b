"""Drivers that embed texts with each engine, in its own Python: `drivers.py SYSTEM OPTIONS` answers lines of JSON.

Imports nothing of octavo at the top: the Python of another engine runs this file too.
"""

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

Embed = Callable[[list[str]], list[list[float]]]


def octavo(options: dict[str, Any]) -> Embed:
    """Load the model through `octavo.LLM`."""
    from octavo import LLM

    llm = LLM(model=options["model"], **options["settings"])
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def sentence_transformers(options: dict[str, Any]) -> Embed:
    """Load the model with the library, in float32 or bfloat16."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(options["threads"])
    model = SentenceTransformer(options["model"], device="cpu", model_kwargs={"dtype": options["dtype"]})
    return lambda texts: model.encode(texts, batch_size=32, convert_to_tensor=True).float().tolist()


def onnxruntime(options: dict[str, Any]) -> Embed:
    """Export to ONNX and run with ONNX Runtime; texts are sorted by length, as Sentence Transformers does."""
    import numpy as np
    import onnxruntime as ort
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options["threads"]
    session = ort.InferenceSession(_exported(options, tokenizer), settings, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def embed(texts: list[str]) -> list[list[float]]:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors: list[list[float]] = [[]] * len(texts)
        for start in range(0, len(texts), 32):
            places = order[start : start + 32]
            inputs = tokenizer([texts[place] for place in places], padding=True, truncation=True, return_tensors="np")
            (hidden,) = session.run(None, {name: inputs[name].astype(np.int64) for name in names})
            mask = inputs["attention_mask"][..., None].astype(np.float32)
            means = (hidden * mask).sum(1) / mask.sum(1)
            for place, vector in zip(places, means / np.linalg.norm(means, axis=1, keepdims=True), strict=True):
                vectors[place] = vector.tolist()
        return vectors

    return embed


def _exported(options: dict[str, Any], tokenizer: Any) -> str:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(options["model"], dtype=torch.float32, attn_implementation="eager").eval()
    inputs = tokenizer(["one text", "another, longer text"], padding=True, return_tensors="pt")
    names = list(inputs)
    axes = {name: {0: "batch", 1: "length"} for name in [*names, "hidden"]}

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.model(**dict(zip(names, tensors, strict=True))).last_hidden_state
            return hidden

    path: str = options["onnx"]
    arguments = tuple(inputs[name] for name in names)
    torch.onnx.export(
        Hidden(), arguments, path, input_names=names, output_names=["hidden"], dynamic_axes=axes, dynamo=False
    )
    return path


def vllm(options: dict[str, Any]) -> Embed:
    """Load the model through `vllm.LLM`."""
    from vllm import LLM

    llm = LLM(model=options["model"], runner="pooling", disable_log_stats=True, **options["settings"])
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def http(options: dict[str, Any]) -> Embed:
    """Use a server with OpenAI's API, such as llama-server; each request has 64 texts."""

    def embed(texts: list[str]) -> list[list[float]]:
        vectors = []
        for start in range(0, len(texts), 64):
            body = json.dumps({"model": "m", "input": texts[start : start + 64]}).encode()
            request = urllib.request.Request(options["url"], body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                data = json.load(answer)["data"]
            vectors += [entry["embedding"] for entry in sorted(data, key=lambda entry: entry["index"])]
        return vectors

    return embed


DRIVERS = {each.__name__: each for each in (octavo, sentence_transformers, onnxruntime, vllm, http)}


def main() -> None:
    """Measure for each line of standard input: a JSON object with `texts`, `short` and `repeats`."""
    embed = DRIVERS[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        started = time.perf_counter()
        vectors = embed(task["texts"])
        elapsed_s, latencies_s = time.perf_counter() - started, []
        for _ in range(task["repeats"]):
            started = time.perf_counter()
            embed([task["short"]])
            latencies_s.append(time.perf_counter() - started)
        answer = {"elapsed_s": elapsed_s, "latency_s": sorted(latencies_s)[len(latencies_s) // 2]}
        print(json.dumps({**answer, "vectors": vectors[: task["num_compared"]]}), flush=True)


if __name__ == "__main__":
    main()
