"""The rules of ARCHITECTURE.md that a program can check, over every source file."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from source_tree import ROOT, find_cycle, import_graph, modules, package_dirs

MAY_IMPORT = {
    "protocol": set(),
    "kernels": set(),
    "frontend": {"protocol"},
    "core_proc": {"protocol"},
    "worker_proc": {"protocol", "kernels"},
}
"""The arrows: which of our folders each folder may import, besides itself."""

THIRD_PARTY = {
    "protocol": {"cloudpickle", "msgspec", "zmq"},
    "kernels": {"numpy", "torch", "triton"},
    "core_proc": {"msgspec", "zmq", "llguidance"},
}
"""The only packages these folders may import; the other two may use every declared dependency."""

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "mixin"}

READS_ENVIRONMENT = {"protocol/env.py"}
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "putenv"}

CATCHES_EVERYTHING = {
    "core_proc/grammar/compiler.py": "the boundary of a thread; whoever waits for the grammar is told; it is logged",
    "core_proc/transfer/plugin.py": "code of users runs; a request whose contents it does not find is computed",
    "frontend/generation/gbnf.py": "the grammar library raises bare Exception; it goes on as a ValueError",
    "frontend/generation/tensors.py": "the file of a stranger makes the unpickler raise anything; a request's error",
    "frontend/http/background_responses.py": "a fault with one response must end it as failed; it is logged",
    "frontend/batch/service.py": "a fault with one batch must not stop the others; it is logged, and tried again",
    "frontend/batch/asgi_call.py": "a fault of ours in one line of a batch must not lose the others; it is logged",
    "frontend/membership/directory.py": "a command that another process has sent must be answered; it is logged",
    "frontend/plugins/calls.py": "code of users runs; what it raises ends the request that it was run for",
    "frontend/plugins/loading.py": "code of users is imported; it goes on as a ConfigError",
    "frontend/media/child.py": "decoders raise anything for damaged files; the answer for one image or audio clip",
    "frontend/http/route.py": "raised again, for the server's log, as soon as its client has been answered",
    "frontend/text/tokenizer_files.py": "the tokenizers library raises bare Exception; it goes on as a ConfigError",
    "protocol/kv_connector_loading.py": "code of users is imported; it goes on as a ConfigError",
    "worker_proc/cache/connector_store.py": "code of users runs; contents that it does not load are computed",
    "worker_proc/models/fallback/configuration.py": "code of transformers and of repositories runs; a ConfigError",
    "worker_proc/sampling/processor_loading.py": "code of users is imported; it goes on as a ConfigError",
    "worker_proc/sampling/processors.py": "code of users runs; what it raises ends the request that it was run for",
    "protocol/lifecycle.py": "the main function of a child: the last chance to name the root cause",
}
"""Files that may stop any exception, at the boundary of a process or of a library, and why."""

MAY_IMPORT_CLOUDPICKLE = {"protocol/code.py"}
"""At most one file."""

CATCHES_ERRORS_OF_PICKLE = {"worker_proc/weights/pytorch.py"}
"""Files that torch saved are read by its restricted unpickler, which raises errors of `pickle`."""

MAY_IMPORT_RAY = {"core_proc/workers/ray.py", "frontend/ray_engines.py", "protocol/ray_cluster.py"}


def test_imports_follow_the_arrows() -> None:
    wrong = []
    for module in modules():
        allowed = MAY_IMPORT[module.folder] | {module.folder}
        for name in module.imports:
            top, _, rest = name.partition(".")
            inner = rest.partition(".")[0]
            # The facade is the frontend's. A bare `protocol` works nowhere but in the root of a checkout.
            is_forbidden = inner not in allowed if inner in MAY_IMPORT else inner and module.folder != "frontend"
            if top in MAY_IMPORT or (top == "octavo" and is_forbidden):
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_the_core_knows_workers_by_their_protocol() -> None:
    """How a group of workers is run is chosen in `workers/launch.py`, and known nowhere else."""
    inner = "octavo.core_proc.workers."
    seams = {inner + name for name in ("group", "commands", "launch")}
    for module in modules():
        if not module.where.startswith("core_proc/workers/"):
            used = {name for name in module.imports if name.startswith(inner)}
            assert {".".join(name.split(".")[:4]) for name in used} <= seams, module.where


def test_third_party_imports() -> None:
    wrong = []
    for module in modules():
        allowed = THIRD_PARTY.get(module.folder)
        tops = {name.partition(".")[0] for name in module.imports} - sys.stdlib_module_names - {"octavo"}
        if module.where in MAY_IMPORT_RAY:
            tops -= {"ray"}
        if allowed is not None and not tops <= allowed:
            wrong.append(f"{module} imports {sorted(tops - allowed)}")
    assert not wrong


def test_imports_are_absolute() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong


def test_nothing_is_pickled() -> None:
    tops = {module.where: {name.partition(".")[0] for name in module.imports} for module in modules()}
    unsafe = {where for where, names in tops.items() if names & {"pickle", "marshal", "shelve", "dill"}}
    assert unsafe == CATCHES_ERRORS_OF_PICKLE
    for module in modules():
        if module.where in unsafe:
            uses = [node for node in module.nodes if isinstance(node, ast.Attribute)]
            names = {node.attr for node in uses if isinstance(node.value, ast.Name) and node.value.id == "pickle"}
            assert names == {"UnpicklingError"}, module
        loads = [node for node in module.nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
        assert all("weights_only=True" in ast.unparse(node) for node in loads), module
    assert {where for where, names in tops.items() if "cloudpickle" in names} <= MAY_IMPORT_CLOUDPICKLE
    assert len(MAY_IMPORT_CLOUDPICKLE) <= 1


def test_ray_is_imported_where_it_is_used_only() -> None:
    """It is an extra: a few files import it, inside of functions."""
    for module in modules():
        if "ray" in {name.partition(".")[0] for name in module.imports}:
            assert module.where in MAY_IMPORT_RAY, module
        if "octavo.core_proc.workers.ray" in {name.rpartition(".")[0] for name in module.imports}:
            assert module.where == "core_proc/workers/launch.py"
    loaded = _modules_loaded_by(
        "import octavo.frontend.cli, octavo.core_proc.core, octavo.worker_proc.worker, octavo.core_proc.workers.ray, "
        "octavo.frontend.ray_engines"
    )
    assert "octavo.core_proc.workers.ray" in loaded and "ray" not in loaded


def test_names_say_what_a_module_is() -> None:
    wrong = [module.name for module in modules() if FORBIDDEN_NAMES & set(module.name.replace("_", ".").split("."))]
    assert not wrong


def test_environment_is_read_in_one_file() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module in modules()
        if module.where not in READS_ENVIRONMENT
        for node in module.nodes
        if isinstance(node, ast.Attribute | ast.alias) and _last_name(node) in ENVIRONMENT_NAMES
    ]
    assert not wrong


def _last_name(node: ast.Attribute | ast.alias) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.name


def test_broad_catches_stand_at_process_boundaries() -> None:
    wrong = [
        f"{module}:{line}"
        for module in modules()
        if module.where not in CATCHES_EVERYTHING
        for line in _broad_catches(module.nodes)
    ]
    assert not wrong


def _broad_catches(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines that stop any exception; one that cleans up and raises it again does not."""
    for node in nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {part.id for part in caught if isinstance(part, ast.Name)}
            raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if not raises_again and (node.type is None or names & {"Exception", "BaseException"}):
                yield node.lineno


def test_allow_lists_are_not_stale() -> None:
    catching = {module.where for module in modules() if any(_broad_catches(module.nodes))}
    assert CATCHES_EVERYTHING.keys() <= catching
    assert {module.where for module in modules()} >= READS_ENVIRONMENT | MAY_IMPORT_CLOUDPICKLE


def test_there_is_no_import_cycle() -> None:
    cycle = find_cycle(import_graph())
    assert not cycle, " -> ".join(cycle)


def test_find_cycle_sees_a_cycle() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_every_package_says_what_it_is() -> None:
    for folder in package_dirs().values():
        for path in folder.rglob("__init__.py"):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            assert docstring and len(docstring) > 20, f"{path} has no docstring"


def code_map() -> Iterator[tuple[list[Path], list[str]]]:
    """Yield, for each line of the code map, the paths it stands for and the files that its description names."""
    block = (ROOT / "ARCHITECTURE.md").read_text().partition("## Code map")[2].split("```")[1]
    folders: list[tuple[int, Path]] = []
    for line in filter(str.strip, block.splitlines()):
        depth = len(line) - len(line.lstrip())
        while folders and folders[-1][0] >= depth:
            folders.pop()
        names, _, description = line.strip().partition("  ")
        paths = [(folders[-1][1] if folders else ROOT) / name for name in names.split()]
        yield paths, re.findall(r"[\w/]+\.(?:py|h|cpp|json)\b", description)
        if paths[-1].is_dir():
            folders.append((depth, paths[-1]))


def test_code_map_names_only_what_exists() -> None:
    for paths, described in code_map():
        assert not [path for path in paths if not path.exists()]
        # A file in a description lies in one of the folders of its line, or beside the files of its line.
        folders = [path if path.is_dir() else path.parent for path in paths]
        beside = [*folders, *(folder.parent for folder in folders)]
        assert not [name for name in described if not any((folder / name).exists() for folder in beside)]


def test_code_map_has_a_line_for_every_folder_with_code() -> None:
    mapped = {path for paths, _ in code_map() for path in paths}
    top = [*package_dirs().values(), ROOT / "kernels", ROOT / "tests", ROOT / "scripts"]
    with_code = {file.parent for folder in top for suffix in ("py", "cpp", "h") for file in folder.rglob(f"*.{suffix}")}
    assert not sorted(with_code - mapped)


def test_core_loads_neither_torch_nor_the_frontend() -> None:
    names = [m.name for m in modules() if m.folder == "core_proc" and not m.name.endswith("__main__")]
    loaded = _modules_loaded_by("import importlib\n" + f"for name in {names}: importlib.import_module(name)")
    assert "octavo.core_proc" in loaded
    assert not loaded & {"torch", "numpy", "triton", "transformers", "octavo.frontend", "octavo.worker_proc"}


def test_help_loads_nothing_heavy() -> None:
    loaded = _modules_loaded_by(
        "from octavo.frontend.cli import main\n"
        "sys.argv = ['octavo', '--help']\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
    )
    assert "octavo.frontend.cli" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "tokenizers", "fastapi", "pydantic", "uvicorn"}


def _modules_loaded_by(code: str) -> set[str]:
    """Return `sys.modules` of a fresh interpreter after it has run `code`."""
    # The list goes last, after whatever the code prints.
    code = f"import json, sys\n{code}\nprint()\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))
