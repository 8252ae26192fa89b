"""What the worker imports, and what it leaves out."""

import json
import subprocess
import sys

NEVER = ("transformers", "torch._dynamo", "torch._inductor", "gguf")
"""What takes long to import and is not needed to serve."""


def test_the_worker_imports_nothing_that_it_does_not_use() -> None:
    code = "import octavo.worker_proc.worker, octavo.worker_proc.models.llama"
    code = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert "torch" in modules
    assert not modules & set(NEVER)
