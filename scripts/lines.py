"""Reports the size of the code, and fails if a file or function is too long without a reason.

A reason is a comment `# long: why splitting would hide something`: in column 0 for a file, for a function on the line
above its first decorator or `def`, or at the end of that line.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["protocol", "frontend", "core_proc", "worker_proc", "kernels", "scripts", "tests"]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
REASON = "# long: "


def main() -> int:
    """Print totals per folder and what is too long, longest first; return 1 if a reason is missing."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    long: list[tuple[int, str, str]] = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            lines[folder] += source.count("\n")
            files[folder] += 1
            name = str(path.relative_to(ROOT))
            long += [(length, f"{name}{where}", reason) for length, where, reason in too_long(source)]
    for folder in FOLDERS:
        print(f"{lines[folder]:7,} lines  {files[folder]:4} files  {folder}")
    print(f"{lines.total():7,} lines  {files.total():4} files  total")
    print(f"\nfiles over {MAX_FILE_LINES} lines and functions over {MAX_FUNCTION_LINES}: {len(long)}")
    for length, where, reason in sorted(long, reverse=True):
        print(f"{length:7,}  {where}  ({reason or f'no reason: split it, or write {REASON.strip()} ... beside it'})")
    return int(any(not reason for _, _, reason in long))


def too_long(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (number of lines, ":LINE FUNCTION" or "" for the file, reason) for all that is too long."""
    lines = source.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield len(lines), "", next(filter(None, map(_reason, lines)), "")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                above = lines[first - 2].strip() if first > 1 else ""
                at_the_end = lines[first - 1][lines[first - 1].find("#") :]
                yield length, f":{node.lineno} {node.name}", _reason(above) or _reason(at_the_end)


def _reason(comment: str) -> str:
    return comment.removeprefix(REASON).strip() if comment.startswith(REASON) else ""


if __name__ == "__main__":
    sys.exit(main())
