"""The packages that are installed from the folders."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from source_tree import ROOT, modules, package_dirs

FOLDERS = ["protocol", "frontend", "core_proc", "worker_proc", "kernels"]


def test_packages_list_equals_the_folders() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {module.name for module in modules() if module.path.name == "__init__.py"}
    assert set(setuptools["packages"]) == on_disk
    assert setuptools["packages"] == sorted(on_disk), "keep the list sorted"


def test_no_folder_of_sources_lacks_its_init() -> None:
    folders = {path.parent for folder in package_dirs().values() for path in folder.rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel through links to the sources, so that the checkout gets no build folder."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ["pyproject.toml", "README.md", "LICENSE", *FOLDERS]:
        (source / name).symlink_to(ROOT / name)
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_one_top_level_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"octavo"}


def test_wheel_holds_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for module in modules():
        is_package = module.path.name == "__init__.py"
        path = module.name.replace(".", "/") + ("/__init__.py" if is_package else ".py")
        assert path in names
    assert "octavo/py.typed" in names


def test_wheel_holds_the_sources_of_the_native_library(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [path for path in (ROOT / "kernels").rglob("*") if path.suffix in (".cpp", ".h")]
    assert len(sources) > 5
    assert not [path for path in sources if f"octavo/{path.relative_to(ROOT).as_posix()}" not in names]


@pytest.mark.parametrize("name", FOLDERS)
def test_bare_folder_names_are_not_importable(name: str, tmp_path: Path) -> None:
    code = f"import importlib.util; assert importlib.util.find_spec({name!r}) is None"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for folder in (ROOT, tmp_path):
        subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, env=environment, check=True)


def test_tests_do_not_see_the_checkout() -> None:
    assert str(ROOT) not in sys.path
