"""The pages are true: names exist, commands can be run, links lead somewhere, imports go downwards."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import typer
from tiny_models import write_model

from kvmem_llama.cli.main import app
from kvmem_llama.server.flags import FLAGS as SERVER_FLAGS
from kvmem_llama.settings import OPTIONS

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "kvmem_llama"
README = (REPO / "README.md").read_text(encoding="utf-8")
STRUCTURE = (REPO / "docs" / "structure.md").read_text(encoding="utf-8")
PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").glob("*.md")])
MODULES = {
    ".".join(file.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
    if file.parent.name != "_lib"  # made by the build
}
SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def spans(page: str) -> list[str]:
    """Words set as code, outside of code blocks."""
    return SPAN.findall(FENCE.sub("", page))


def blocks(page: str, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page) if kind == language]


# -- structure.md


def files_named() -> list[str]:
    """Spans that are paths: with a suffix of a source file, or in scripts/ or .ci/."""
    is_path = re.compile(r"(scripts/|\.ci/)?[\w./-]+\.(py|cpp|h|patch|toml|json|md|txt)|(scripts|\.ci)/\w+")
    return [span for span in spans(STRUCTURE) if is_path.fullmatch(span)]


def resolved(name: str) -> Path | None:
    return next((path for path in (PACKAGE / name, REPO / name) if path.is_file()), None)


def test_every_file_is_named_in_the_structure_page() -> None:
    files = list(MODULES.values())
    for folder in ("patches", "kernels", "chat_shim", "vendor", "scripts"):
        for path in sorted((REPO / folder).rglob("*")):
            inside = path.relative_to(REPO).parts
            if path.is_file() and "__pycache__" not in inside and inside[:2] != ("vendor", "build"):
                files.append(path)
    named = {resolved(name) for name in files_named()}
    missing = [str(file.relative_to(REPO)) for file in files if file not in named]
    assert not missing, f"docs/structure.md does not name {', '.join(missing)}"


def test_every_file_that_the_structure_page_names_exists() -> None:
    absent = [name for name in files_named() if resolved(name) is None]
    assert not absent, f"docs/structure.md names {', '.join(absent)}"


def test_every_function_and_class_that_the_structure_page_names_exists() -> None:
    functions, methods, names = set[str](), set[str](), set[str]()
    for module, file in MODULES.items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                functions |= {node.name, f"{module.rpartition('.')[2]}.{node.name}"}
            elif isinstance(node, ast.ClassDef):
                names.add(node.name)
                methods |= {
                    f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)
                }
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for file in (REPO / "patches").glob("*.cpp"):
        functions |= set(re.findall(r"\b(\w+)\(", file.read_text(encoding="utf-8")))
    calls = {span.removesuffix("()") for span in spans(STRUCTURE) if span.endswith("()")}
    assert len(calls) > 40
    assert not calls - functions - methods
    assert not {span for span in spans(STRUCTURE) if re.fullmatch(r"[A-Z]\w+", span)} - names


# -- imports


def layers() -> dict[str, int]:
    """Module or package -> its layer, as the table of the structure page says."""
    found: dict[str, int] = {}
    for number, members in re.findall(r"^\| (\d+) \| (.+) \|$", STRUCTURE, re.MULTILINE):
        for name in SPAN.findall(members):
            found["kvmem_llama." + name.rstrip("/").removesuffix(".py")] = int(number)
    return found


def layer_of(module: str, table: dict[str, int]) -> int:
    """The package itself lies below all: it imports nothing until a name is used."""
    if module == "kvmem_llama":
        return -1
    return table[".".join(module.split(".")[:2])]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(module: str, *, inner: bool) -> Iterator[str]:
    """Absolute names of what a module imports at run time; inner: also where a function runs."""

    def walk(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child
            elif not is_type_checking(child) and (inner or not isinstance(child, ast.FunctionDef)):
                yield from walk(child)

    file = MODULES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            continue
        parts = package.split(".")
        base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        name = ".".join(filter(None, (base, node.module)))
        for alias in node.names:
            yield f"{name}.{alias.name}" if f"{name}.{alias.name}" in MODULES else name


def test_imports_go_downwards_only() -> None:
    table = layers()
    upwards = [
        f"{module} imports {name}"
        for module in MODULES
        for name in imports(module, inner=True)
        if name in MODULES and layer_of(name, table) > layer_of(module, table)
    ]
    assert not upwards, "; ".join(upwards)


def test_every_module_has_a_layer_and_every_layer_a_module() -> None:
    table = layers()
    assert {".".join(module.split(".")[:2]) for module in MODULES if module != "kvmem_llama"} == set(table)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {m: {name for name in imports(m, inner=False) if name in MODULES} for m in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_nothing_imports_cupy() -> None:
    for module, file in MODULES.items():
        assert not re.search(r"^\s*(import|from)\s+cupy\b", file.read_text(encoding="utf-8"), re.MULTILINE), (
            module
        )


# -- commands


def command_lines() -> list[list[str]]:
    """Every command line of the README, in code blocks and in the text."""
    lines = [line for text in blocks(README, "sh") for line in text.splitlines()]
    starts = ("bash ", "scripts/", ".venv/bin/python ", "kvmem ", "pip ")
    lines += [span for span in spans(README) if span.startswith(starts)]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_script(words: list[str], *, by_name: bool) -> None:
    script = REPO / words[0]
    assert script.is_file(), words
    assert not by_name or script.stat().st_mode & 0o100, f"{words[0]} is not executable"
    if words[0] == "scripts/bench_engine":
        assert set(words[1:]) <= bench_parts(), words
    elif words[0] == "scripts/build":
        extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(words[1:]) <= set(extras), words
    else:
        assert len(words) == 1, words


def bench_parts() -> set[str]:
    for node in ast.parse((REPO / "scripts" / "bench_engine").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARTS":
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    raise AssertionError("scripts/bench_engine has no table PARTS")


def subcommands() -> dict[str, set[str]]:
    """Subcommand -> its flags."""
    group: Any = typer.main.get_command(app)
    table = {flag for option in OPTIONS for flag in option.flags}
    known = {
        name: table.union(*((*p.opts, *p.secondary_opts) for c in leaves(command) for p in c.params))
        for name, command in group.commands.items()
    }
    return known | {"serve": known["serve"] | set(SERVER_FLAGS)}  # it reads its command line itself


def leaves(command: Any) -> list[Any]:
    """The command, or those of a group."""
    return list(command.commands.values()) if hasattr(command, "commands") else [command]


def test_command_lines_of_the_readme_can_be_run() -> None:
    lines = command_lines()
    assert ["bash", "scripts/demo"] in lines and ["bash", "scripts/test"] in lines
    known = subcommands()
    for words in lines:
        match words:
            case ["bash" | ".venv/bin/python", *rest]:
                check_script(rest, by_name=False)
            case [script, *_] if script.startswith("scripts/"):
                check_script(words, by_name=True)
            case ["kvmem", name, *rest]:
                flags = {word for word in rest if word.startswith("-")} - {"--help"}
                assert flags <= known[name], f"{' '.join(words)}: {flags - known[name]}"
            case ["pip", "install", "."]:
                pass
            case _:
                pytest.fail(f"what is this? {' '.join(words)}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_and_subcommands_that_a_page_names_exist(page: Path) -> None:
    known = subcommands()
    flags = set[str]().union(*known.values()) | {"--help", "--version"}
    text = page.read_text(encoding="utf-8")
    named = {word for span in spans(text) for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    assert not named - flags - {"--check", "--page"}  # of scripts
    commands = {span.split()[1] for span in spans(text) if re.match(r"kvmem [a-z]", span)}
    assert commands <= set(known)


def test_the_python_example_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model.gguf", "llama")
    (tmp_path / "notes.md").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    monkeypatch.chdir(tmp_path)
    resolve: Callable[..., Path] = lambda spec, cache, notify=None: model  # noqa: E731
    monkeypatch.setattr("kvmem_llama.models.resolve", resolve)
    (example,) = blocks(README, "python")
    exec(compile(example, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert re.search(r"\['\d+ of \d+ blocks recalled'", out)


# -- pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}, link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_is_left_open(page: Path) -> None:
    assert not re.findall(r"@@\w*@@", page.read_text(encoding="utf-8"))
