"""Writes docs/options.md from the table in kvmem_llama/settings.py; with --check only compares.

python scripts/options_page.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from kvmem_llama.settings import OPTIONS, Option  # noqa: E402

PAGE = REPO / "docs" / "options.md"
HEAD = """# Options

Every option of kvmem_llama. A value comes from the command line, else from the environment, else from the
default. Made from the table in `kvmem_llama/settings.py` by `python scripts/options_page.py`; do not edit.

llama.cpp's options keep their names and meanings, including the flags with one dash and several letters."""


def row(option: Option) -> str:
    flags = " ".join(f"`{flag}`" for flag in option.flags)
    if option.type is bool:
        flags += f" / `--no-{option.flags[-1].removeprefix('--')}`"
    values = ", ".join(f"`{choice}`" for choice in option.choices) or option.limits
    if option.words:
        values += " or " + ", ".join(f"`{word}`" for word in option.words)
    default = {True: "on", False: "off"}[option.default] if option.type is bool else option.default
    shown = f"`{default}`" if default != "" else ""
    return f"| {flags} | {option.help} | {shown} | {option.unit} | {values} | `{option.env}` |"


def page() -> str:
    parts = [HEAD]
    for section in dict.fromkeys(option.section for option in OPTIONS):
        parts.append(f"\n## {section}\n\n| flag | what it does | default | unit | values | environment |")
        parts.append("|---|---|---|---|---|---|")
        parts += [row(option) for option in OPTIONS if option.section == section]
    return "\n".join(parts) + "\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
            print(f"{PAGE.relative_to(REPO)} is out of date: run python scripts/options_page.py")
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
