"""Which files of the library a stage imports, directly or not: read from the source, imports in functions included."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent


def modules_of(path: Path) -> set[str]:
    """Dotted names of pipeline modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "pipeline"}


def file_of(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    if base.with_suffix(".py").exists():
        return base.with_suffix(".py")
    return base / "__init__.py" if (base / "__init__.py").exists() else None


def imported(stage: str, rooms: tuple[str, ...] = (), formats: str = "*") -> set[Path]:
    """Files of pipeline/ that stages/`stage`.py needs, with those of the `rooms` of `formats`, imported by name."""
    pending = [ROOT / "stages" / f"{stage}.py"]
    for room in rooms:
        pending += (ROOT / "pipeline" / "formats").glob(f"{formats}/{room}.py")
    seen = set(pending)
    while pending:
        for module in modules_of(pending.pop()):
            path = file_of(module)
            if path and path not in seen:
                seen.add(path)
                pending.append(path)
    return {path.relative_to(ROOT) for path in seen if path.stat().st_size}
