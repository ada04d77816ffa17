"""Checks the import rules of the package from its source, without importing it.

1. A file imports only from its own folder and from folders listed above it in `LAYERS`.
   `__init__.py` of the package itself is exempt: it only re-exports, lazily.
2. Nothing above the torch line imports torch, transformers or torchtitan, not even inside a
   function: plans can be validated and priced without them.
3. `runtime` imports nothing of the compiler: only what `RUNTIME_MAY_USE` names.
4. The command line imports nothing below the line at module level, so `validate` stays light.

Usage: python tools/check_layers.py [ROOT]; exit 1 and one line per violation otherwise.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "seqcomp"
TORCH_FREE = ("diagnostics", "layout", "plan", "strategies", "hardware", "cost", "search")
BELOW_THE_LINE = ("runtime", "capture", "placement", "lowering")
# Leaves: only the package's `__init__`, and leaves listed after them, import these.
LEAVES = ("report", "api", "verify", "integrations", "profiling", "cli", "__main__", "training")
LAYERS = (*TORCH_FREE, *BELOW_THE_LINE, *LEAVES)
RUNTIME_MAY_USE = ("diagnostics", "layout", "runtime")
HEAVY = ("torch", "transformers", "torchtitan")


@dataclass(frozen=True)
class Import:
    """One import: dotted name, line, and whether it runs when the module is imported."""

    name: str
    line: int
    at_import: bool


def imports(source: str, module: str, *, is_package: bool) -> Iterator[Import]:
    """All absolute names that `source`, the text of `module`, imports at any depth."""
    parts = module.split(".")
    base = parts if is_package else parts[:-1]
    tree = ast.parse(source)
    lazy = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, id(node) not in lazy)
        elif isinstance(node, ast.ImportFrom):
            prefix = base[: len(base) - node.level + 1] if node.level else []
            stem = ".".join([*prefix, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{stem}.{alias.name}", node.lineno, id(node) not in lazy)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def violations(root: Path) -> list[str]:
    """One line `path:line: what is wrong` per broken rule in `root`/seqcomp."""
    found: list[str] = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        relative = path.relative_to(root)
        parts = list(relative.with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        if is_package:
            parts.pop()
        if len(parts) == 1:
            continue
        layer = parts[1]
        if layer not in LAYERS:
            found.append(f"{relative}:1: {layer} has no place in LAYERS of tools/check_layers.py")
            continue
        source = path.read_text(encoding="utf-8")
        for item in imports(source, ".".join(parts), is_package=is_package):
            problem = _problem(layer, item)
            if problem:
                found.append(f"{relative}:{item.line}: {problem}")
    return list(dict.fromkeys(found))


def _problem(layer: str, item: Import) -> str | None:
    names = item.name.split(".")
    if names[0] in HEAVY and layer in TORCH_FREE:
        return f"{layer} is above the torch line but imports {names[0]}"
    if names[0] in HEAVY and layer == "cli" and item.at_import:
        return f"cli imports {names[0]} at module level; import it inside the command"
    if names[0] != PACKAGE or len(names) == 1:
        return None
    target = names[1]
    if target not in LAYERS:
        # `from seqcomp import parallelize`: the public names, which only leaves may use.
        return None if layer in LEAVES else f"{layer} imports the public name {item.name}"
    if layer == "training" and target in ("cli", "__main__"):
        return "training imports the command line"
    if layer == "runtime" and target not in RUNTIME_MAY_USE:
        return f"runtime imports {target}; it may use only {', '.join(RUNTIME_MAY_USE)}"
    if LAYERS.index(target) > LAYERS.index(layer):
        return f"{layer} imports {target}, which lies below it"
    if layer == "cli" and target in BELOW_THE_LINE and item.at_import:
        return f"cli imports {target} at module level; import it inside the command"
    return None


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    found = violations(root)
    for line in found:
        print(line)
    print(f"import layers: {len(found)} violation(s)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
