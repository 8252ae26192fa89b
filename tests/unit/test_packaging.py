"""The packages that are installed from the folders."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from functools import partial
from pathlib import Path

import build_wheels
import pytest
from build_wheels import build_octavo
from source_tree import ROOT, modules, package_dirs

from octavo.kernels.native.build import PREBUILT_PACKAGE, NativeUnavailable, Toolchain, build
from octavo.protocol.version import __version__

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
    """Return the wheel that is built from the sdist, so that the sdist has all that it needs."""
    sdist, wheel = build_octavo(tmp_path_factory.mktemp("wheel"))
    assert sdist.name.endswith(".tar.gz")
    return wheel


def test_prebuilt_kernels_are_found_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build_wheels, "Toolchain", partial(Toolchain, sources=sources))
    made = build_wheels.build_kernels(tmp_path, ["portable"], None)
    assert made.name.startswith(f"{PREBUILT_PACKAGE}-{__version__}-py3-none-linux_")
    zipfile.ZipFile(made).extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    monkeypatch.setattr("octavo.kernels.native.build.find_compilers", lambda given: iter(()))
    found = build(Toolchain(tmp_path / "cache", sources=sources))
    assert found.path.parent == tmp_path / "site" / PREBUILT_PACKAGE and found.compiler is None
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler") as caught:
        build(Toolchain(tmp_path / "cache", sources=sources))
    assert PREBUILT_PACKAGE in caught.value.hint, "those of another version are not used"


def test_the_changelog_and_the_version_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    heads = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "Unreleased", "changes go there until they are released"
    chart = (ROOT / "deploy" / "helm" / "octavo" / "Chart.yaml").read_text()
    assert f'appVersion: "{__version__}"' in chart and f"version: {__version__}" in chart


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
