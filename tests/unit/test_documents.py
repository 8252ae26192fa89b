"""Checks that the documents agree with the code."""

import re
import tomllib
from pathlib import Path

import pytest
from source_tree import ROOT

from octavo.core_proc.request import REQUEST_TRANSITIONS
from octavo.frontend.engine_state import ENGINE_TRANSITIONS
from octavo.protocol.lifecycle import PROCESS_TRANSITIONS

ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()

documents = pytest.mark.parametrize(
    "document", [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], ids=lambda path: path.relative_to(ROOT).as_posix()
)


@documents
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", document.read_text())
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (document.parent / target).exists()]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its own, and those that GitHub gives to the headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    named = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)">', text))


@documents
def test_links_name_headings_that_exist(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    pages = [(document.parent / page if page else document, anchor) for page, anchor in links]
    assert not [(page.name, anchor) for page, anchor in pages if page.suffix == ".md" and anchor not in anchors(page)]


@documents
def test_named_files_exist(document: Path) -> None:
    # `folder/file.py` and `scripts/name`, as they stand in running text.
    folders = "protocol|frontend|core_proc|worker_proc|kernels|tests|scripts"
    named = re.findall(rf"`(?:\./)?((?:{folders})/[\w./]*)", document.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("folder", ["docs", "docs/adr"])
def test_indexes_link_to_every_page(folder: str) -> None:
    linked = re.findall(r"\]\(([^)#]+\.md)", (ROOT / folder / "README.md").read_text())
    assert not {page.name for page in (ROOT / folder).glob("*.md")} - {*linked, "README.md"}


def test_every_runtime_dependency_has_its_sentence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    runtime = ("ray", "otel", "batch", "compiler", "image", "audio")
    requirements = [*project["dependencies"], *(one for name in runtime for one in extras[name])]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}
    rows = re.findall(r"^\| ([\w, -]+) \|", (ROOT / "docs/adr/0009-runtime-dependencies.md").read_text(), re.MULTILINE)
    explained = {name for row in rows for name in row.split(", ")} - {"package", "---"}
    assert explained == names


@pytest.mark.parametrize(
    "table", [REQUEST_TRANSITIONS, PROCESS_TRANSITIONS, ENGINE_TRANSITIONS], ids=["request", "process", "engine"]
)
def test_drawn_state_machines_are_the_real_ones(table: dict[object, frozenset[object]]) -> None:
    name = type(next(iter(table))).__name__
    drawing = ARCHITECTURE.partition(f"```\n{name}\n")[2].partition("```")[0]
    drawn = {state: set(targets.split()) for state, targets in re.findall(r"^ +(\w+) +->(.*)$", drawing, re.MULTILINE)}
    assert drawn == {state.value: {target.value for target in targets} for state, targets in table.items()}
