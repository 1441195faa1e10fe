"""The table in docs/proxy.md: that of the programs in `proxy_programs`. It is written by running this module."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "proxy.md"
BEGIN, END = "<!-- table: tests/test_proxy_docs.py -->\n", "<!-- end of table -->\n"

WHY_NOT = {
    "jax.debug.print (cannot work)": "the client in jaxlib refuses host callbacks",
    "jax.pure_callback (cannot work)": "the client in jaxlib refuses host callbacks",
    "host arrays with negative strides (cannot work)": "the client refuses them: copy first",
}


def table() -> str:
    from tests.proxy_programs import PROGRAMS

    lines = ["| program | works |", "|---|---|"]
    for title in PROGRAMS:
        works = f"no: {WHY_NOT[title]}" if title in WHY_NOT else "yes"
        lines.append(f"| {title.removesuffix(' (cannot work)')} | {works} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_true() -> None:
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table()


def test_what_cannot_work_is_what_the_tests_say() -> None:
    from tests.test_proxy_programs import CANNOT_WORK

    assert set(WHY_NOT) == set(CANNOT_WORK)


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN) + len(BEGIN)] + table() + text[text.index(END) :])
