"""Report files and functions longer than the project's ceilings; exit 1 only for gross excess."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE, KERNEL, FUNCTION = 300, 450, 40  # ceilings in lines
GROSS_FILE, GROSS_FUNCTION = 1.5, 2.0  # so many times the ceiling is a failure


def long_parts(path: Path) -> Iterator[tuple[str, int, int, bool]]:
    """(what, lines, ceiling, whether gross) of the file and of each function in it that is over its ceiling."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    ceiling = KERNEL if name.startswith("pallas_kernels/") else FILE
    lines = source.count("\n")
    if lines > ceiling:
        yield name, lines, ceiling, lines > GROSS_FILE * ceiling
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION:
                yield f"{name}:{node.lineno} {node.name}()", lines, FUNCTION, lines > GROSS_FUNCTION * FUNCTION


def main() -> int:
    folders = ("jaxserve", "pallas_kernels", "scripts", "tests")
    files = [ROOT / "server.py", *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))]
    files = [path for path in files if path.exists()]
    found = [part for path in files for part in long_parts(path)]
    for what, lines, ceiling, gross in found:
        print(f"{'TOO LONG' if gross else 'long'}: {what}: {lines} lines (ceiling {ceiling})")
    product = [path for path in files if path.relative_to(ROOT).parts[0] not in {"tests", "scripts"}]
    total = sum(path.read_text(encoding="utf-8").count("\n") for path in product)
    print(f"{len(files)} files, {total} lines outside tests and scripts, {len(found)} over a ceiling")
    return any(gross for *_, gross in found)


if __name__ == "__main__":
    sys.exit(main())
