"""What the worker imports, and what it does not."""

import json
import subprocess
import sys

from source_tree import import_graph

NEVER = ("transformers", "torch._dynamo", "torch._inductor", "gguf")
"""What takes long to import and is not needed to serve."""


def test_the_worker_imports_nothing_that_it_does_not_use() -> None:
    code = "import octavo.worker_proc.worker, octavo.worker_proc.models.llama"
    code = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert "torch" in modules
    assert not modules & set(NEVER)


def test_the_folder_of_a_runner_may_be_deleted() -> None:
    """Nothing outside of it imports it: the registry finds it by name."""
    runners = "octavo.worker_proc.runners."
    packages = {name.split(".")[3] for name in import_graph() if name.startswith(runners) and name.count(".") > 3}
    assert packages == {"cuda_graphs", "native", "torch"}
    wrong = [
        f"{importer} imports {target}"
        for importer, targets in import_graph().items()
        for target in targets
        for package in packages
        if f"{target}.".startswith(f"{runners}{package}.") and not f"{importer}.".startswith(f"{runners}{package}.")
    ]
    assert not wrong
