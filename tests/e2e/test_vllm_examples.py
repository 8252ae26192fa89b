"""vLLM's own offline examples, unchanged, with tiny models: docs/vllm-compatibility.md lists them."""

import re
from pathlib import Path

import pytest
from default_model import ModelMissing, vllm_source
from source_tree import ROOT
from vllm_examples import EXAMPLES, Example, TinyHub

IN_EVERY_RUN = ("basic/offline_inference/chat.py", "deployment/llm_engine_example.py")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> TinyHub:
    try:
        vllm_source()
    except ModelMissing as error:
        pytest.skip(f"vLLM's source cannot be downloaded: {error}")
    return TinyHub(tmp_path_factory.mktemp("hub"))


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=one.path, marks=() if one.path in IN_EVERY_RUN else pytest.mark.long) for one in EXAMPLES],
)
def test_an_example_of_vllm_runs(example: Example, hub: TinyHub, tmp_path: Path) -> None:
    output = hub.run(example, tmp_path)
    assert [part for part in example.shows if part not in output] == [], output[-3000:]


def test_the_page_lists_all_examples() -> None:
    listed = re.findall(r"^\| `([\w/]+\.py)` \| yes", (ROOT / "docs/vllm-compatibility.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(one.path for one in EXAMPLES)
