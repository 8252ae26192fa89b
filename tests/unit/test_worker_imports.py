"""What the worker imports, and what it leaves out."""

import json
import subprocess
import sys

NEVER = ("transformers", "sympy", "torch._dynamo", "torch._inductor", "gguf", "torch._decomp.decompositions")


DEFERRED = "from octavo.worker_proc.deferred_import import defer_unused_imports; defer_unused_imports()\n"


def loaded_after(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after the code."""
    code = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_worker_imports_nothing_that_it_does_not_use() -> None:
    modules = loaded_after(DEFERRED + "import octavo.worker_proc.worker, octavo.worker_proc.models.llama")
    assert "torch" in modules
    assert not modules & set(NEVER)


def test_what_is_deferred_is_there_when_it_is_asked_for() -> None:
    ask = "import torch; assert callable(torch._meta_registrations.register_meta)"
    assert "torch._decomp.decompositions" in loaded_after(DEFERRED + ask)
    shape = "x = torch.empty(3, 4, device='meta'); assert torch.linalg.qr(x).Q.shape == (3, 3)"
    loaded_after(DEFERRED + ask + "\n" + shape)


def test_what_builds_on_the_deferred_can_be_imported_after_it() -> None:
    run = "import torch; from octavo.worker_proc.deferred_import import run_deferred_imports; run_deferred_imports()\n"
    modules = loaded_after(DEFERRED + run + "run_deferred_imports(); import torch._dynamo")
    assert {"torch._dynamo", "torch._decomp.decompositions"} <= modules
    assert "torch._dynamo" in loaded_after(run + "import torch._dynamo"), "where nothing was deferred"


def test_deferring_late_does_no_harm() -> None:
    assert "torch._decomp.decompositions" in loaded_after("import torch\n" + DEFERRED)


def test_an_unknown_name_is_an_error_as_ever() -> None:
    ask = """
import torch
try:
    torch._meta_registrations.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError
"""
    assert "torch" in loaded_after(DEFERRED + ask)
