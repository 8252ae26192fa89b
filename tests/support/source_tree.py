"""The project's own modules and what each imports, read from the sources without importing anything."""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def package_dirs() -> dict[str, Path]:
    """Return setuptools' table: package name to the folder it is installed from."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    return {name: ROOT / folder for name, folder in table.items()}


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    """As it is imported: `octavo.protocol.codec`; a package's `__init__.py` has the package's name."""
    path: Path

    def __str__(self) -> str:
        return self.where

    @property
    def where(self) -> str:
        """The path from the root of the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def folder(self) -> str:
        """The top-level folder it lies in: protocol, frontend, ..."""
        return self.where.partition("/")[0]

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.path.read_text(), filename=self.where)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, cached: walking takes longer than parsing, and many tests need it."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> frozenset[str]:
        """Every name imported anywhere: at the top, inside functions, under TYPE_CHECKING.

        `from a import b` gives both `a` and `a.b`, for `b` may be a module.
        """
        return frozenset(self._imports())

    def _imports(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def modules() -> tuple[Module, ...]:
    """Return every module of the five packages and of the facade."""
    found = []
    folders = package_dirs()
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            inner = next(other for other in path.parents if other in folders.values())
            if inner == folder:
                parts = path.relative_to(folder).with_suffix("").parts
                name = ".".join([package, *parts]).removesuffix(".__init__")
                found.append(Module(name, path))
    return tuple(found)


def import_graph() -> dict[str, set[str]]:
    """Return, for each module, the modules of ours that it names in an import.

    `from octavo.protocol import codec` leads to the module `codec`, not to the package around it.
    """
    names = {module.name for module in modules()}
    return {module.name: set(_targets(module, names)) & names - {module.name} for module in modules()}


def _targets(module: Module, names: set[str]) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in names else node.module


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules along one import cycle, the first again at the end; [] if there is none."""
    finished: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in finished:
            return []
        for target in sorted(graph[name]):
            if cycle := visit(target, [*trail, name]):
                return cycle
        finished.add(name)
        return []

    return next((cycle for name in sorted(graph) if (cycle := visit(name, []))), [])
