"""Loading takes the memory of the weights and of about one tensor more, an update that of one tensor."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.kernels.linear.packing import PACKED_AT_ONCE_BYTES
from octavo.kernels.native import library

WIDTH, INNER_WIDTH, NUM_LAYERS, VOCAB_SIZE = 1024, 4096, 4, 1024
LARGEST_BYTES = 2 * 2 * INNER_WIDTH * WIDTH
"""Of the weights that are packed together: gates and ups."""
SLACK_BYTES = PACKED_AT_ONCE_BYTES + 6 * 2**20
"""Rows that are being packed; huge pages of which a part is used; small pieces that the C library keeps."""
UPDATE_SLACK_BYTES = PACKED_AT_ONCE_BYTES + 2**20
"""The same in an update. With 3 MB more, an old weight could still be there while its successor is packed."""
INT8_SLACK_BYTES = 2 * 2**20
"""More for scales that are packed beside the levels."""
PROGRAM = Path(__file__).resolve().parents[1] / "support" / "loading_memory.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral in its own format: matrices of queries and keys are copied, because their rows are in another order."""
    directory = tmp_path_factory.mktemp("model")
    layer = {
        **{f"attention.w{part}.weight": (WIDTH, WIDTH) for part in "qkvo"},
        **{f"feed_forward.w{part}.weight": (INNER_WIDTH, WIDTH) for part in "13"},
        "feed_forward.w2.weight": (WIDTH, INNER_WIDTH),
        "attention_norm.weight": (WIDTH,),
        "ffn_norm.weight": (WIDTH,),
    }
    shapes = {f"layers.{index}.{name}": shape for index in range(NUM_LAYERS) for name, shape in layer.items()}
    shapes |= {
        "tok_embeddings.weight": (VOCAB_SIZE, WIDTH),
        "norm.weight": (WIDTH,),
        "output.weight": (VOCAB_SIZE, WIDTH),
    }
    tensors = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, directory / "consolidated.safetensors")
    params = {
        "dim": WIDTH,
        "n_layers": NUM_LAYERS,
        "head_dim": 64,
        "hidden_dim": INNER_WIDTH,
        "n_heads": WIDTH // 64,
        "n_kv_heads": WIDTH // 64,
        "norm_eps": 1e-5,
        "vocab_size": VOCAB_SIZE,
        "rope_theta": 1e6,
        "max_seq_len": 128,
    }
    (directory / "params.json").write_text(json.dumps(params))
    return directory


def measured(model: Path, when: str, quantization: str = "none") -> dict[str, int]:
    library.load()  # compiled before the measurement, if it is not yet
    command = [sys.executable, "-P", str(PROGRAM), str(model), quantization, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_weights_are_packed_while_they_are_read(model: Path) -> None:
    streamed, copied = (measured(model, when) for when in ("streamed", "copied"))
    assert streamed["weights"] == copied["weights"] > 90 * 2**20
    bound = streamed["weights"] + LARGEST_BYTES + SLACK_BYTES
    assert streamed["peak"] <= bound
    assert copied["peak"] > bound, "the measurement must see the memory of tensors"


@pytest.mark.parametrize(
    ("when", "quantization"),
    [
        ("received", "none"),
        pytest.param("updated", "none", marks=pytest.mark.long),
        pytest.param("updated", "int8", marks=pytest.mark.long),
        pytest.param("received", "w8a8", marks=pytest.mark.long),
    ],
)
def test_an_update_takes_no_second_copy(model: Path, when: str, quantization: str) -> None:
    updated = measured(model, when, quantization)
    # Copies are there until the last of those that are packed together; here those of queries and keys, and all that a
    # trainer sends, which take the memory of the old weight. Mapped files are no memory of ours.
    allowed = LARGEST_BYTES + UPDATE_SLACK_BYTES + (INT8_SLACK_BYTES if quantization == "int8" else 0)
    assert allowed < updated["weights"] / 2, "a second copy would be seen"
    assert updated["peak"] <= allowed
