"""README and docs are true: their Python runs, their commands have the flags that are shown, their links lead on.

The Python blocks of a page are one script. All pages, and the examples, share one embedded cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pathway as pw
from pathway.config import Settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The page's fenced blocks in these languages, each with the line that it starts after."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start(2)), match.group(2))
        for match in BLOCK.finditer(text)
        if match.group(1) in languages
    ]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect() as client:
        yield client


@pytest.fixture
def connected(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`pathway.connect()` gives the shared cluster, and slices that a script leaves behind are released."""
    taken: list[Any] = []
    take = pw.slice

    def taking(*args: Any, **kwargs: Any) -> Any:
        taken.append(take(*args, **kwargs))
        return taken[-1]

    monkeypatch.setattr(pw, "connect", lambda *_, **__: contextlib.nullcontext(cluster))
    monkeypatch.setattr(pw, "slice", taking)
    yield
    for slice_ in taken:
        slice_.release()


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType(f"page_{page.stem}")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for line, block in blocks(page, "python"):
        # Blank lines in front: a traceback names the line of the page.
        exec(compile("\n" * line + block, str(page), "exec"), module.__dict__)
    if page.name == "README.md":
        right = float(re.search(r"([\d.]+)% of 360", capsys.readouterr().out).group(1))  # type: ignore[union-attr]
        assert right > 95


@pytest.mark.usefixtures("connected")
def test_the_first_program_learns(capsys: pytest.CaptureFixture[str]) -> None:
    from examples import first_program

    first_program.main()
    before, after = map(float, re.search(r"error ([\d.]+) -> ([\d.]+)", capsys.readouterr().out).groups())  # type: ignore[union-attr]
    assert after < before / 4


@pytest.mark.usefixtures("connected")
def test_the_pipeline_learns_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optax")
    from examples import pipeline

    pipeline.main(tmp_path / "timeline.svg")
    before, after = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", capsys.readouterr().out).groups())  # type: ignore[union-attr]
    assert after < before / 4
    assert "</svg>" in (tmp_path / "timeline.svg").read_text()


@pytest.mark.usefixtures("connected")
def test_the_cascade_is_better_together_and_runs_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    from examples import cascade

    cascade.main()
    shown = capsys.readouterr().out
    alone, together = map(int, re.search(r"(\d+)% by the small model alone, (\d+)%", shown).groups())  # type: ignore[union-attr]
    assert together > alone
    assert "no specialist ran" in shown


def commands(page: Path) -> Iterator[list[str]]:
    """Every call of the `pathway` command in the page's shell blocks."""
    for _, block in blocks(page, "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words and words[0] == "pathway":
                yield words[1:]


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))], ids=lambda page: page.name)
def test_the_commands_of_a_page_exist_with_their_flags(page: Path) -> None:
    helps: dict[str, str] = {}
    for words in commands(page):
        command = words[0] if not words[0].startswith("-") else ""
        if command not in helps:
            asked = [sys.executable, "-m", "pathway", *filter(None, [command]), "--help"]
            shown = subprocess.run(asked, capture_output=True, text=True, timeout=60)
            assert shown.returncode == 0, shown.stderr
            helps[command] = shown.stdout
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        missing = [flag for flag in flags if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", helps[command])]
        assert not missing, f"pathway {' '.join(words)}: {missing} not in its --help"


def keys_of(status: Any) -> set[str]:
    """Every key of the status, apart from those of a mesh, which are the user's."""
    if isinstance(status, dict):
        return set(status).union(*(keys_of(value) for key, value in status.items() if key != "mesh"))
    if isinstance(status, list):
        return set().union(*map(keys_of, status))
    return set()


def test_the_page_of_the_command_line_names_every_key_of_the_status_and_every_setting(cluster: Any) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    with pw.slice(1):
        wanted = keys_of(cluster.status()) | {field.name for field in dataclasses.fields(Settings)}
    assert [name for name in sorted(wanted) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
