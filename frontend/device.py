"""Resolves `--device auto` on this machine. Does not import torch, so that wrong settings fail fast."""

import importlib.util
import re
from pathlib import Path

from octavo.protocol.config.engine import DeviceName

_CUDA_VERSION = re.compile(r"^cuda\b[^=\n]*=\s*['\"]", re.MULTILINE)
"""Matches torch/version.py of a CUDA build; a CPU build has `cuda: Optional[str] = None`."""


def detect_device(*, hides_gpus: bool, root: Path = Path("/")) -> DeviceName:
    """Return the device to use if none is configured.

    Args:
        hides_gpus: whether the environment hides GPUs from this process.
        root: folder that contains `dev`; tests pass another one.
    """
    has_gpu = not hides_gpus and any((root / "dev").glob("nvidia[0-9]*"))
    return "cuda" if has_gpu and torch_has_cuda() else "cpu"


def torch_has_cuda() -> bool:
    """Return whether the installed torch is built for CUDA, according to its version file."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return bool(_CUDA_VERSION.search((Path(torch.origin).parent / "version.py").read_text()))
