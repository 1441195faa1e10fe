"""Who may import whom (design, section 3): import-linter's contracts, and what it cannot see."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PRIVATE_JAX = ("jax._src", "jaxlib")
MAY_USE_PRIVATE_JAX = {
    "pathway/dataflow/computation.py",
    "pathway/dataflow/jaxtypes.py",
    "pathway/executor/backend.py",
    "pathway/testing/interpret.py",
}


def imported(path: Path) -> Iterator[str]:
    """The dotted name of everything that a file imports, wherever in it, with what is taken out of modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_contracts_are_kept() -> None:
    # In a process of its own: the linter takes over this one's output.
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("module", ["pathway.sched.daemon", "pathway.executor.supervisor", "pathway.cli"])
def test_processes_that_compute_nothing_do_not_import_jax(module: str) -> None:
    program = f"import {module}, sys; sys.exit('JAX was imported' if 'jax' in sys.modules else 0)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_private_names_of_jax_are_used_in_few_files() -> None:
    users = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / "pathway").rglob("*.py"))
        if (names := [name for name in imported(path) if name.startswith(PRIVATE_JAX)])
    }
    assert set(users) <= MAY_USE_PRIVATE_JAX, users


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("examples/*.py"), ROOT / "pathway" / "demo.py"]), ids=lambda path: path.name
)
def test_examples_use_the_public_names_alone(path: Path) -> None:
    inside = [name for name in imported(path) if name.startswith("pathway.")]
    assert [name for name in inside if not name.startswith("pathway.programs.")] == []  # programs are public
