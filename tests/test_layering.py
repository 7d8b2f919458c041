"""The rules of the tree, each one a small test: who may import whom, how long things may be, what may not be written.

    python -m pytest tests/test_layering.py

A new module of miles_core fails here until it has its place in LAYERS.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up. A unit (a module or package of miles_core, or a name at the top) imports from lower lines, or from its own
# line without a cycle.
LAYERS = (
    "kernels",
    "schema config guard digest shm",
    "topology numerics metrics pacing rundir status journal_file",
    "tasks model",
    "routing",
    "engine tito advantage ring pack loss optim report route_transport",
    "weights checkpoint assets journal parity replay evaluation earlier",
    "start records rerun",
    "rollout",
    "train",
)
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
SOURCES = (".py", ".sh", ".sbatch", ".cpp", ".h")
TEXTS = (*SOURCES, ".md", ".toml", ".txt", ".json")


def find(*suffixes: str, under: tuple[str, ...] = ("kernels", "miles_core", "launch", "tests")) -> list[Path]:
    """Files of the project with one of these suffixes: those at the top, and those of the given folders."""
    found = list(ROOT.glob("*")) + [path for folder in under for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in found if path.suffix in suffixes and path.is_file())


PRODUCT = [path for path in find(".py", under=("kernels", "miles_core", "launch")) if path.name != "setup.py"]
TESTS = [path for path in find(".py", under=("tests",)) if "tests" in path.parts[len(ROOT.parts) :]]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node` but those under `if TYPE_CHECKING`, which never run."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from runtime_nodes(child)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def imports(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, anywhere in it."""
    names = set()
    for node in runtime_nodes(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are written in full, so that grep finds them"
            names |= {full if is_module(full := f"{node.module}.{alias.name}") else node.module for alias in node.names}
    return names


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def unit_of(module: str) -> str:
    """miles_core.engine.cache -> engine; kernels.linear -> kernels; train -> train."""
    parts = module.split(".")
    return parts[1] if parts[0] == "miles_core" and len(parts) > 1 else parts[0]


def inside(path: Path, *folders: str) -> bool:
    return any((ROOT / folder) in path.parents for folder in folders)


def test_units_import_only_from_lower_layers() -> None:
    level = {unit: i for i, line in enumerate(LAYERS) for unit in line.split()}
    wrong = []
    for path in PRODUCT:
        unit = unit_of(module_of(path))
        if unit in ("miles_core", "launch"):
            continue
        assert unit in level, f"{name_of(path)}: give `{unit}` its place in LAYERS of {name_of(Path(__file__))}"
        ours = {unit_of(name) for name in imports(path) if name.split(".")[0] in ("kernels", "miles_core", "rollout", "train")}
        wrong += [f"{name_of(path)} imports {other}" for other in ours - {"miles_core"} if level.get(other, len(LAYERS)) > level[unit]]
    assert wrong == []


def test_imports_have_no_cycle() -> None:
    modules = {module_of(path): path for path in PRODUCT}
    graph = {module: (imports(path) & modules.keys()) - {module} for module, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, naming the cycle


def test_kernels_import_nothing_of_ours() -> None:
    assert [name_of(p) for p in PRODUCT if inside(p, "kernels") and tops(p) & {"miles_core", "rollout", "train"}] == []


def test_kernels_init_is_a_docstring() -> None:
    # transformers imports a package of this name when it finds one: there must be nothing to run and nothing to find.
    (only,) = tree_of(ROOT / "kernels/__init__.py").body
    assert isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant) and isinstance(only.value.value, str)


def test_every_kernel_has_its_definition_and_its_test() -> None:
    ops = [path.parent for path in PRODUCT if path.match("kernels/*/__init__.py") and path.parent.name != "cpu"]
    assert len(ops) >= 8
    assert [op.name for op in ops if not (op / "ref.py").exists() or not (ROOT / f"tests/kernels/test_{op.name}.py").exists()] == []


def test_only_topology_creates_process_groups() -> None:
    makers = {"init_process_group", "new_group", "split_group", "new_subgroups", "init_device_mesh", "DeviceMesh"}
    wrong = []
    for path in PRODUCT:
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        if name_of(path) != "miles_core/topology.py":
            wrong += [f"{name_of(path)}:{call.lineno}" for call in calls if makers & set(re.findall(r"\w+", ast.unparse(call.func)))]
    assert wrong == []


def test_transformers_is_imported_in_hf_alone() -> None:
    assert [name_of(p) for p in PRODUCT if "transformers" in tops(p)] == ["miles_core/model/hf.py"]


def test_config_is_read_by_the_two_scripts_alone() -> None:
    assert [name_of(p) for p in PRODUCT if "miles_core.config" in imports(p)] == ["rollout.py", "train.py"]


def test_tasks_do_not_load_torch() -> None:
    # Reward processes import the tasks: without torch they start in a tenth of a second and take a tenth of the memory.
    code = "import sys, miles_core.tasks, miles_core.tasks.rewards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in find(*SOURCES)}
    assert {name: n for name, n in lengths.items() if n >= MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    """Or say why not, in a line `# long: <reason>` above or inside."""
    wrong = []
    for path in PRODUCT + TESTS:
        lines = path.read_text().splitlines()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                excused = any("# long: " in line for line in lines[max(first - 2, 0) : node.end_lineno])
                length = node.end_lineno - node.lineno + 1
                if length >= MAX_FUNCTION_LINES and not excused:
                    wrong.append(f"{name_of(path)}:{node.lineno} {node.name} has {length} lines")
    assert wrong == []


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (not node.name.startswith("_") or node.name == "__init__"):
            yield node


def test_public_functions_have_type_hints() -> None:
    wrong = []
    for path in PRODUCT:
        for node in public_functions(tree_of(path).body):
            a = node.args
            arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]
            bare = [x.arg for x in arguments if x.annotation is None and x.arg not in ("self", "cls", "ctx")]
            if node.returns is None and node.name != "__init__":
                bare.append("its result")
            wrong += [f"{name_of(path)}:{node.lineno} {node.name}: no type for {x}" for x in bare]
    assert wrong == []


def test_no_exception_is_swallowed() -> None:
    broad = {"Exception", "BaseException"}
    wrong = []
    for path in PRODUCT + TESTS:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type) in broad):
                silent = all(isinstance(line, ast.Pass | ast.Continue) or ast.unparse(line) in ("...", "return None") for line in node.body)
            else:
                silent = isinstance(node, ast.Call) and "suppress" in ast.unparse(node.func) and broad & set(map(ast.unparse, node.args))
            if silent:
                wrong.append(f"{name_of(path)}:{node.lineno}")
    assert wrong == []


def grep(pattern: str, files: list[Path]) -> list[str]:
    lines = [(name_of(path), i, line) for path in files for i, line in enumerate(path.read_text().splitlines(), 1)]
    return [f"{name}:{i}: {line.strip()}" for name, i, line in lines if re.search(pattern, line)]


def test_nothing_is_left_for_later() -> None:
    assert grep(r"\b(TO[D]O|FIX[M]E|XX[X]|HAC[K])\b", find(*TEXTS)) == []


def test_no_absolute_paths() -> None:
    assert grep(r"(?<![\w.])/(home|work|root|Users|opt|mnt)/\w", find(*TEXTS)) == []


def test_no_test_is_skipped() -> None:
    assert grep(r"(mark|pytest|unittest)\.(skip|xfail)|importor[s]kip", TESTS) == []


def test_test_files_say_how_to_run_them() -> None:
    wrong = [
        name_of(path)
        for path in TESTS
        if path.name.startswith("test_") and f"pytest {name_of(path)}" not in (ast.get_docstring(tree_of(path)) or "")
    ]
    assert wrong == []


def test_ruff() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "."]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
