"""`from_gguf`: what transformers makes of a GGUF file, without taking the file apart again and again.

transformers parses all of the metadata each time it needs any of it, and makes the table of the tensors' names anew for
every submodule: half a minute for the default model. Here each is done once in a process; the results are the same.
"""

import functools
from pathlib import Path
from typing import Any

import gguf
import pytest

_reader = functools.cache(gguf.GGUFReader)
_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


def from_gguf(auto_class: Any, path: Path, **arguments: Any) -> Any:
    """Return `auto_class.from_pretrained` of a file, which must not change as long as this process lives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", _reader)
        patch.setattr(gguf, "get_tensor_name_map", _tensor_name_map)
        return auto_class.from_pretrained(path.parent, gguf_file=path.name, **arguments)
