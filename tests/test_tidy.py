"""The house style, held as a ratchet: what is listed in an allowance below may only shrink."""

from __future__ import annotations

import ast
import functools
import gc
import io
import keyword
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("swarm", "averaging", "moe")
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 500
# path or path:function -> lines it may have; remove an entry as soon as it fits
ALLOWED_LONGER: dict[str, int] = {
    "benchmarks/__main__.py:main": 80,
    "benchmarks/bare_transport.py:_work": 80,
    "benchmarks/trainer_costs.py:_rows": 80,
}
PARAMETERS_MAX = 6
# the public contract (swarm.Averager, swarm.Optimizer, swarm.Expert, the command line), and services that
# take their neighbours as parameters
WIDE = {
    "benchmarks/__main__.py:main": 9,
    "averaging/averager.py:__init__": 14,
    "averaging/averager.py:step": 7,
    "averaging/optim/optimizer.py:__init__": 17,
    "averaging/matchmaking/service/matchmaking_service.py:__init__": 10,
    "moe/server/expert.py:__init__": 8,
    "averaging/matchmaking/logic/matchmaking.py:__init__": 7,
    "averaging/matchmaking/service/presence.py:__init__": 7,
    "moe/client/mixture/layer.py:__init__": 11,
    "moe/client/mixture/switch.py:__init__": 11,
}
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "misc.py", "common.py", "util.py"}
# the two places that may catch every error: the RPC handler boundary and the supervisor
BROAD_EXCEPT = {"swarm/net/server.py", "swarm/runtime/supervise.py"}
FAR_AWAY = re.compile(r"\b(?:/work/|/root/|/home/\w+|farm-|TODO|FIXME|XXX|findings? [A-Z]\d)")


def sources(*tops: str) -> list[Path]:
    return sorted(
        path for top in tops for path in (ROOT / top).rglob("*.py") if not path.name.endswith("_pb2.py")
    )


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    # CPython 3.11 counts recursion wrongly when a garbage collection runs finalizers in the middle of
    # ast.parse, and raises SystemError: earlier tests leave tasks whose finalizers log
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    finally:
        gc.enable()


EVERY_SOURCE = sources(*PACKAGES, "tests", "benchmarks", "examples")
PACKAGE_SOURCES = sources(*PACKAGES)


@pytest.mark.parametrize("path", EVERY_SOURCE, ids=name_of)
def test_modules_and_functions_stay_short(path: Path) -> None:
    name = name_of(path)
    lines = path.read_text(encoding="utf-8").count("\n")
    limit = ALLOWED_LONGER.get(name, MODULE_LINES_MAX)
    assert lines <= limit, f"{name} has {lines} lines: split it into parts with names of their own"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            limit = ALLOWED_LONGER.get(f"{name}:{node.name}", FUNCTION_LINES_MAX)
            assert length <= limit, f"{name}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("path", EVERY_SOURCE, ids=name_of)
def test_no_file_has_a_catch_all_name(path: Path) -> None:
    assert path.name not in FORBIDDEN_NAMES
    assert not FAR_AWAY.search(path.read_text(encoding="utf-8")) or path.name == "test_tidy.py"


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=name_of)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), f"{name_of(path)} has no docstring"


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=name_of)
def test_broad_excepts_stand_in_two_places(path: Path) -> None:
    broad = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
        )
        and not (node.body and isinstance(node.body[-1], ast.Raise))  # what is raised again is not swallowed
    ]
    assert not broad or name_of(path) in BROAD_EXCEPT, f"{name_of(path)}: broad except at {broad}"


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=name_of)
def test_every_task_has_a_parent(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            bare = (node.func.value.id, node.func.attr) in {
                ("asyncio", "create_task"),
                ("asyncio", "gather"),
                ("asyncio", "ensure_future"),
                ("loop", "create_task"),
            }
            assert not bare, (
                f"{name_of(path)}:{node.lineno}: asyncio.{node.func.attr} without a parent; "
                "use a TaskGroup or the supervisor"
            )


@pytest.mark.parametrize("path", PACKAGE_SOURCES, ids=name_of)
def test_wide_signatures_become_configs(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
            assert count <= WIDE.get(f"{name_of(path)}:{node.name}", PARAMETERS_MAX), (
                f"{name_of(path)}:{node.lineno} {node.name} takes {count} parameters"
            )


@pytest.mark.parametrize("path", sources("swarm", "averaging", "moe"), ids=name_of)
def test_except_star_blocks_raise_nothing(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.TryStar):
            raised = [
                one.lineno
                for handler in node.handlers
                for one in ast.walk(handler)
                if isinstance(one, ast.Raise)
            ]
            assert not raised, (
                f"{name_of(path)}:{raised[0]} raises: Python 3.11.2 puts that into a group; "
                "raise it afterwards"
            )


@pytest.mark.parametrize("path", sources("tests"), ids=name_of)
def test_tests_wait_for_events_not_for_time(path: Path) -> None:
    if path.parts[-2] in ("chaos", "wire"):
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep":
            zero = node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            virtual = path.parts[-2] == "sim"  # the virtual clock jumps: nobody waits
            assert zero or virtual, f"{name_of(path)}:{node.lineno} sleeps"


def test_generated_files_are_left_alone_and_nothing_else_is_ignored() -> None:
    ignores = [
        f"{name_of(path)}:{number}"
        for path in PACKAGE_SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"#\s*(?:type: ignore(?!\[)|noqa(?!: [A-Z]))", line)
    ]
    assert not ignores, f"say which rule is ignored: {ignores}"


DOCUMENT_CHARACTERS_MAX = 120
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {"build", "dist"} & set(path.relative_to(ROOT).parts)
    and not path.relative_to(ROOT).parts[0].startswith(".")
)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_lines_of_documents_fit_a_window(path: Path) -> None:
    """Check the length of all lines but those of tables, and those that a link makes long."""
    wide = [
        f"{name_of(path)}:{number} has {len(line)} characters"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > DOCUMENT_CHARACTERS_MAX
        and not line.lstrip().startswith("|")
        and len(re.sub(r"\]\([^)]*\)", "]", line)) > DOCUMENT_CHARACTERS_MAX
    ]
    assert not wide, f"break these lines: {wide}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_relative_links_of_documents_resolve(path: Path) -> None:
    text = re.sub(
        r"^( *)(`{3,}).*?^\1\2 *$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    links = re.findall(r"\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)", re.sub(r"`[^`]*`", "", text))
    broken = [
        link
        for link in links
        if not re.match(r"[a-z]+:|#", link) and not (path.parent / link.partition("#")[0]).exists()
    ]
    assert not broken, f"{name_of(path)} links to what is not there: {broken}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_documents_name_nothing_of_one_machine(path: Path) -> None:
    assert not FAR_AWAY.search(path.read_text(encoding="utf-8"))


# The language.
FRAGMENT = re.compile(r"(?:What|Who|Whom|Whose|Of|And|By|So|It|Its|Those|Whether|From whom)\b")
FUNCTION_FRAGMENT = re.compile(r"(?:How|Is|As|For)\b")
UNUSED_WORDS = re.compile(
    r"\b(?:whom|whoever|lest|anew|afresh|thereby|hearsay|buried|bury|buries|beaten|in the place of)\b"
    r"|\bso (?:long|many|often)\b(?! as\b)"
    r"|\b(?:goes|go|went|gone|going) on\b|\bfor (?:ever|good)\b|\bat hand\b|\bnobody but\b|\bof one's own\b"
    r"|\b(?:comes|becomes) of\b|\bbefall|\b(?:tells?|told) apart\b|\bin the eyes of\b|\bturn(?:s|ed)? bad\b",
    re.IGNORECASE,
)
CODE_CHARACTERS_MAX = 110


def folder_of(path: Path) -> str:
    """Return the first two folders of a path, such as "swarm/dht"; "." for files at the top."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2]) or "."


CODE_FOLDERS = sorted({folder_of(path) for path in EVERY_SOURCE})


def code_of(folder: str) -> list[Path]:
    return [path for path in EVERY_SOURCE if folder_of(path) == folder]


@pytest.mark.parametrize("folder", CODE_FOLDERS)
def test_docstrings_begin_as_sentences(folder: str) -> None:
    found = [
        f"{name_of(path)}:{getattr(node, 'lineno', 1)} {text.split(maxsplit=1)[0]} …"
        for path in code_of(folder)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and (
            FRAGMENT.match(text)
            or (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and FUNCTION_FRAGMENT.match(text)
                and not node.name.startswith("test_")
            )
        )
    ]
    assert not found, f"begin these docstrings with a full sentence: {found}"


@pytest.mark.parametrize("folder", sorted({*CODE_FOLDERS, *map(folder_of, DOCUMENTS)}))
def test_words_are_those_of_plain_english(folder: str) -> None:
    found = [
        f"{name_of(path)}:{number} {word}"
        for path in [*code_of(folder), *(one for one in DOCUMENTS if folder_of(one) == folder)]
        if path.name != "test_tidy.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in UNUSED_WORDS.findall(line)
    ]
    assert not found, f"say this in plain English: {found}"


@pytest.mark.parametrize("folder", CODE_FOLDERS)
def test_lines_of_code_fit_a_window(folder: str) -> None:
    found = [
        f"{name_of(path)}:{number} has {len(line)} characters"
        for path in code_of(folder)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > CODE_CHARACTERS_MAX
    ]
    assert not found, f"break these lines: {found}"


def test_a_public_class_name_has_one_meaning() -> None:
    modules: dict[str, list[str]] = {}
    for path in PACKAGE_SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(name_of(path))
    shared = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert not shared, f"rename one of each: {shared}"


# private attributes of others that this project sets
SET_FOR_OTHERS = {"_lead_or_follow", "_selector", "_torchdynamo_disable"}


@pytest.mark.parametrize("folder", sorted({folder_of(path) for path in PACKAGE_SOURCES}))
def test_private_values_are_read_in_the_module_that_sets_them(folder: str) -> None:
    found = []
    for path in code_of(folder):
        assigned: dict[str, int] = {}
        read: set[str] = set()
        for node in ast.walk(tree_of(path)):
            name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "value", None)
            is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
            if isinstance(name, str) and not is_stored:
                read.add(name)
            elif isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and node.col_offset == 0):
                assigned[str(name)] = node.lineno
        found += [
            f"{name_of(path)}:{line} {name}"
            for name, line in assigned.items()
            if is_private(name) and name not in read | SET_FOR_OTHERS
        ]
    assert not found, f"nobody reads these: {found}"


COPIED_LINES_MAX = 9


def significant_lines(path: Path) -> list[tuple[int, str]]:
    """Return the numbered lines of a file, but no imports, signatures, docstrings, comments or empty ones."""
    left_out: set[int] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left_out.update(range(node.lineno, node.body[0].lineno))
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return [
        (number, line.strip())
        for number, line in lines
        if line.strip() and not line.strip().startswith("#") and number not in left_out
    ]


def shapes_in_functions(path: Path) -> list[tuple[int, str]]:
    """Return the numbered lines within functions with all names, numbers and strings alike. Lines of brackets
    alone are left out; between two functions stands a line that no other file has.
    """
    inside: set[int] = set()
    shapes: dict[int, list[str]] = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside.update(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
            shapes[node.lineno] = [f"{name_of(path)}:{node.lineno}"]
    inside &= {number for number, _ in significant_lines(path)}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.start[0] in inside and token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING):
            word = token.string if keyword.iskeyword(token.string) else tokenize.tok_name[token.type]
            shapes.setdefault(token.start[0], []).append(word)
        elif token.start[0] in shapes and token.type == tokenize.OP:
            shapes[token.start[0]].append(token.string)
    return [(number, " ".join(words)) for number, words in sorted(shapes.items())]


@pytest.mark.parametrize("lines_of", [significant_lines, shapes_in_functions], ids=lambda one: one.__name__)
def test_no_run_of_ten_lines_stands_twice(lines_of: Callable[[Path], list[tuple[int, str]]]) -> None:
    seen: dict[tuple[str, ...], str] = {}
    for path in PACKAGE_SOURCES:
        lines = lines_of(path)
        for first in range(len(lines) - COPIED_LINES_MAX):
            run = lines[first : first + COPIED_LINES_MAX + 1]
            texts = tuple(line for _, line in run)
            if len(set(texts)) < 3:  # a table
                continue
            place = f"{name_of(path)}:{run[0][0]}"
            earlier = seen.setdefault(texts, place)
            assert earlier == place, f"{place} repeats {earlier}"


# file -> private names of other modules that its tests still use, and why; remove an entry with its last use
ALLOWED_PRIVATE: dict[str, set[str]] = {
    # a member of a round that lies or breaks off is made from the real one; a round has no seam for it yet
    "tests/sim/test_hostile_reducers.py": {"_kernels", "_rounds", "_serve_account"},
    # torch clears it in `GradScaler.step` alone, which the plain half of the test does not call
    "tests/wire/test_torch_contract.py": {"_per_optimizer_states"},
    # writes the state as the end of an epoch does, without a round with the peer that downloads it
    "benchmarks/workers/swarm_state.py": {"_catch_up", "_chunk", "_donor"},
}
# private names of modules outside this project that have no public counterpart
FOREIGN_PRIVATE = {"os._exit", "torch.Tensor._make_subclass", "torch.autograd.Variable._execution_engine"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_defined(path: Path, *, on_self_alone: bool = False) -> set[str]:
    """Return the names that a module assigns or defines; `on_self_alone`: no attributes of other objects."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            if owner in ("self", "cls") or not on_self_alone:
                found.add(node.attr)
    return found


@functools.cache
def names_by_module() -> dict[str, set[str]]:
    """Return the names that the modules of this name define: `test_routing.py` tests `routing.py`."""
    found: dict[str, set[str]] = {}
    for path in sources(*PACKAGES, "benchmarks"):
        found.setdefault(path.stem, set()).update(names_defined(path))
    return found


def private_uses(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield where a module uses private names of objects, or patches them: line, whole text, name."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, ast.unparse(node), node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, one.name, one.name) for one in node.names if is_private(one.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            for argument in node.args[:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    name = argument.value.rsplit(".", 1)[-1]
                    if is_private(name):
                        yield node.lineno, ast.unparse(node), name


@pytest.mark.parametrize("top", ["tests", "benchmarks/workers"])
def test_private_names_are_used_only_by_the_tests_of_their_own_module(top: str) -> None:
    found: list[str] = []
    used: dict[str, set[str]] = {}
    for path in sources(top):
        allowed = names_defined(path, on_self_alone=True)
        if path.stem.startswith("test_"):
            allowed |= names_by_module().get(path.stem.removeprefix("test_"), set())
        for line, text, name in private_uses(path):
            if name in ALLOWED_PRIVATE.get(name_of(path), set()):
                used.setdefault(name_of(path), set()).add(name)
            elif name not in allowed and text not in FOREIGN_PRIVATE:
                found.append(f"{name_of(path)}:{line} {text}")
    assert not found, f"test public behaviour, or give it a public name: {found}"
    listed = {name: allowed for name, allowed in ALLOWED_PRIVATE.items() if name.startswith(top)}
    assert used == listed, "take what is used no more out of the list"


def test_no_test_module_imports_another() -> None:
    found = {
        name_of(path): node.module
        for path in sources("tests")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module and ".test_" in f".{node.module}"
        if node.module.startswith("tests.")
    }
    assert not found, "put what they share into a module beside them, conftest.py or swarm.testing"


def test_decisions_have_no_gaps_and_stand_in_the_index_in_order() -> None:
    folder = ROOT / "docs" / "decisions"
    records = sorted(path.name for path in folder.glob("0*.md"))
    assert [name[:4] for name in records] == [f"{number:04d}" for number in range(1, len(records) + 1)]
    listed = re.findall(r"^\| \[\d{4}\]\((\S+)\)", (folder / "README.md").read_text(), re.MULTILINE)
    assert listed == records
    headings = {name: (folder / name).read_text().split(maxsplit=2)[1] for name in records}
    assert headings == {name: name[:4] for name in records}
    form = ["Status", "Context", "Decision", "Evidence", "Consequences"]
    for name in records:
        assert re.findall(r"^## (.+)$", (folder / name).read_text(), re.MULTILINE) == form, name


@pytest.mark.parametrize(
    ("name", "lines_max"),
    [("README.md", 150), ("docs/benchmarks/index.md", 100)],
    ids=["readme", "benchmarks"],
)
def test_pages_that_people_read_first_are_short(name: str, lines_max: int) -> None:
    assert (ROOT / name).read_text(encoding="utf-8").count("\n") <= lines_max
