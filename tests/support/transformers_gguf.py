"""`from_gguf`: transformers' model of a GGUF file, without parsing the file repeatedly.

transformers parses all metadata whenever it needs a part, and rebuilds the table of tensor names for every submodule,
which takes half a minute for the default model. Here each is done once per process; the results are the same.
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
