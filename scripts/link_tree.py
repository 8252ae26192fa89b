"""Makes `build/types/octavo/`, a tree of symbolic links that shows mypy the packages under their real names.

The five source folders are installed as `octavo.*` by setuptools' `package-dir`; type checkers do not
read that table, but follow this tree. Nothing imports from it.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "types"


def main() -> None:
    """Bring the tree in line with pyproject.toml and the folders on disk."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {name: ROOT / path for name, path in project["tool"]["setuptools"]["package-dir"].items()}
    wanted: dict[Path, Path] = {}
    for name, folder in folders.items():
        place = TREE.joinpath(*name.split("."))
        # Entry by entry: the façade's files are beside the other packages in `octavo`, and its folder is inside
        # the frontend's, where it must not appear as `octavo.frontend.octavo`.
        for entry in folder.iterdir():
            if entry not in folders.values() and not entry.name.startswith(("__pycache__", ".")):
                wanted[place / entry.name] = entry
    _remove_stale(wanted)
    for link, target in wanted.items():
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)


def _remove_stale(wanted: dict[Path, Path]) -> None:
    for path in TREE.glob("octavo/**/*"):
        if path.is_symlink() and (path not in wanted or path.readlink() != wanted[path]):
            path.unlink()


if __name__ == "__main__":
    main()
