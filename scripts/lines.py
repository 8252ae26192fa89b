"""Report how large the code is and which files and functions are longer than the habit allows.

A report, not a gate: it always exits with 0.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["protocol", "frontend", "core_proc", "worker_proc", "kernels", "scripts", "tests"]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def main() -> None:
    """Print the totals per folder, then what is too long, longest first."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    long: list[tuple[int, str]] = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            num_lines = source.count("\n")
            name = str(path.relative_to(ROOT))
            lines[folder] += num_lines
            files[folder] += 1
            if num_lines > MAX_FILE_LINES:
                long.append((num_lines, name))
            long += [(length, f"{name}:{line} {function}") for function, line, length in long_functions(source)]
    for folder in FOLDERS:
        print(f"{lines[folder]:7,} lines  {files[folder]:4} files  {folder}")
    print(f"{lines.total():7,} lines  {files.total():4} files  in all")
    print(f"\nfiles over {MAX_FILE_LINES} lines and functions over {MAX_FUNCTION_LINES}: {len(long)}")
    for length, where in sorted(long, reverse=True):
        print(f"{length:7,}  {where}")


def long_functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first line, number of lines) of each function that is too long."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.name, node.lineno, length


if __name__ == "__main__":
    main()
