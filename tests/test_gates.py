"""The rules that a machine can check: size, layers, state, documentation. Each exception has its reason."""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from torchrun import run_python

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "streamloader"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 8

MANY_ARGUMENTS = {
    # the issue fixes these; everything that comes later goes into their frozen option values
    ("loader/dataset.py", "NumpyDataset.__init__"),
    ("loader/dataset.py", "NumpyMixture.__init__"),  # the same names
    ("conversion/api.py", "convert"),
    ("maintenance/append.py", "append"),  # the same names
}

# module state that changes, each documented where it stands
CHANGING_STATE = {
    "engine/executor.py": "what a thread runs next",
    "engine/messages.py": "what a worker was sent, and what the messages of a thread refer to",
    "engine/transform.py": "the generators of numpy and Python, which a worker's process has once",
    "storage/process.py": "inherited clients; whether this process, or one it was forked from, has used obstore",
    "conversion/sources/ranged_io.py": "where the last part of a compressed file stopped, else each unpacks it again",
}

# what a stage may import of the package: itself, and what stands to its left
BASE = {"errors", "options", "stats", "samples"}
ALLOWED = {
    "errors": set(),
    "samples": set(),
    "options": {"errors"},
    "stats": {"errors", "options"},
    "storage": BASE,
    "show": BASE,
    "format": BASE | {"storage", "show"},
    "order": BASE,
    "images": BASE | {"format"},
    "zarr": BASE | {"storage", "format", "order"},
    "engine": BASE | {"storage", "format", "order", "zarr", "images"},
    "loader": BASE | {"storage", "format", "order", "zarr", "images", "engine", "show"},
    "pytorch": BASE | {"storage", "order", "engine", "loader"},
    "conversion": BASE | {"storage", "format", "zarr", "images"},
    "maintenance": BASE | {"storage", "format", "zarr", "conversion", "images"},
    "metrics": {"errors", "options", "stats", "storage", "show"},
    "measure": BASE | {"storage", "format", "order", "zarr", "images", "engine", "loader"},
    "view": BASE | {"storage", "format", "zarr", "maintenance", "loader", "measure", "metrics", "show"},
    "cli": BASE | {"storage", "format", "zarr", "conversion", "maintenance", "demo", "measure", "view"},
    "__main__": {"cli"},
    "demo": BASE,
    "testing": BASE | {"storage"},  # no module imports it
    "__init__": BASE | {"show", "format", "conversion", "maintenance", "loader", "metrics", "pytorch"},
}

# third-party packages that only some stages may import; `import streamloader` is a user's import
ONLY_IN = {
    "fsspec s3fs gcsfs adlfs obstore botocore aiobotocore boto3": {"storage"},
    "torch torchdata": {"pytorch", "demo"},
    "click rich": {"cli", "demo"},
    "sklearn moto streamloader": {"demo"},
    "numcodecs": {"format", "zarr"},
    "crc32c": {"storage", "format", "conversion", "maintenance"},  # S3 compares it; TFRecords have it too
    # icechunk's store takes zarr-python's ranges; map functions get arrays of any dtype of zarr-python
    "zarr": {"storage", "conversion"},
    "h5py google zstandard distributed ray pyspark": {"conversion", "maintenance"},
    "pyarrow": {"conversion", "maintenance", "storage"},  # pages of references are Parquet
    "av": {"format"},
    "jax tensorflow": {"loader"},
    "prometheus_client opentelemetry": {"metrics"},
    "jinja2": {"show"},
    "aiohttp": {"storage", "view"},
    "dask xarray": {"format", "conversion"},  # `sl.open(url).to_xarray()`; dask also runs conversions
}

UNPICKLABLE = "multiprocessing will pickle the caller's transform: it is tried first, for a clear error"
BY_VALUE = "the caller's object goes to our workers: multiprocessing would hand torch's tensors over as shared memory"
IN_ARENA = "arrays in shared memory are sent by reference, which multiprocessing cannot do"
MAY_PICKLE = {
    "engine/messages.py": IN_ARENA,
    "engine/transform.py": UNPICKLABLE,
    "conversion/sources/objects.py": BY_VALUE,
    "storage/url.py": UNPICKLABLE,  # their credential_provider
}
PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CONTAINERS = {
    *("dict", "list", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "count", "WeakSet"),
    *("WeakValueDictionary", "WeakKeyDictionary", "Lock", "RLock", "Event", "Condition", "local", "ContextVar"),
}
MUTATORS = {
    *("append", "extend", "insert", "remove", "pop", "clear", "update", "setdefault", "popitem", "add"),
    *("discard", "appendleft", "popleft", "sort", "reverse"),
}


@cache
def protocol_methods() -> set[str]:
    """The methods that a Protocol declares: its docstring is theirs."""
    nodes = (node for module in MODULES for node in tree(module).body if isinstance(node, ast.ClassDef))
    protocols = (node for node in nodes if any(ast.unparse(base).startswith("Protocol") for base in node.bases))
    return {f".{inner.name}" for node in protocols for inner in node.body if isinstance(inner, ast.FunctionDef)}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(), module)


def stage(module: str) -> str:
    """The stage a module belongs to: its folder, or its own name at the top."""
    return module.split("/", 1)[0].removesuffix(".py")


def functions(module: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name, nested ones too."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
            name = getattr(child, "name", "") if isinstance(child, ast.ClassDef | ast.FunctionDef) else ""
            yield from walk(child, f"{prefix}{name}." if name else prefix)

    return walk(tree(module), "")


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Every imported module with its line, also those inside functions and for types only."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively: write the whole name"
            name = node.module or ""
            if name.split(".")[0] == "streamloader":
                yield from ((f"{name}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield name, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((str(arg.value), node.lineno) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def test_there_are_modules_to_check():
    assert len(MODULES) > 10
    assert {stage(module) for module in MODULES} <= set(ALLOWED)


@pytest.mark.parametrize("module", MODULES)
def test_functions_stay_small_and_take_few_arguments(module):
    for name, node in functions(module):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines = (node.end_lineno or 0) - node.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{module}:{first} {name} has {lines} lines"
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([a for a in arguments if a not in ("self", "cls")])
        one_for_each_option = any("command" in ast.unparse(decorator) for decorator in node.decorator_list)
        if not one_for_each_option and (module, name) not in MANY_ARGUMENTS:
            assert count <= MAX_ARGUMENTS, f"{module}:{first} {name} takes {count}: group them in a frozen value"


@pytest.mark.parametrize("module", MODULES)
def test_exceptions_are_caught_by_name_or_with_a_reason(module):
    lines = (PACKAGE / module).read_text().splitlines()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ExceptHandler):
            kinds = [] if node.type is None else node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {ast.unparse(kind) for kind in kinds}
            raised = [inner for inner in ast.walk(node) if isinstance(inner, ast.Raise)]
            reraises = any(inner.exc is None or inner.cause for inner in raised)
            broad = not names or (not reraises and names & {"Exception", "BaseException"})
            reason = "noqa: BLE001 - " in lines[node.lineno - 1]
            assert not broad or reason, f"{module}:{node.lineno} catches everything: name what, or say why"


@pytest.mark.parametrize("module", MODULES)
def test_module_state_does_not_change(module):
    if module in CHANGING_STATE:
        return
    tables = set()
    for node in tree(module).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            called = ast.unparse(node.value.func).split(".")[-1] if isinstance(node.value, ast.Call) else ""
            assert called not in CONTAINERS, f"{module}:{node.lineno} keeps changing state in the module"
            if isinstance(node.value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
                tables |= {ast.unparse(target) for target in targets}
    for node in ast.walk(tree(module)):
        assert not isinstance(node, ast.Global), f"{module}:{node.lineno} changes a global"
        changed = ""
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = ast.unparse(node.value)
        elif isinstance(node, ast.AugAssign):
            changed = ast.unparse(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed = ast.unparse(node.func.value)
        assert changed not in tables, f"{module}:{getattr(node, 'lineno', 0)} changes the table {changed}"


@pytest.mark.parametrize("module", MODULES)
def test_a_stage_imports_only_what_stands_to_its_left(module):
    mine = stage(module)
    for name, line in imports(module):
        parts = name.split(".")
        if parts[0] == "streamloader" and len(parts) > 1:
            other = stage(parts[1])
            if (PACKAGE / f"{parts[1]}.py").exists() or (PACKAGE / parts[1]).is_dir():
                assert other == mine or other in ALLOWED[mine], f"{module}:{line} imports {name}"
        else:
            for packages, where in ONLY_IN.items():
                allowed = parts[0] not in packages.split() or mine in where
                assert allowed, f"{module}:{line} imports {name}: only {where} may"


def test_the_order_oracle_shares_no_code_with_the_package():
    assert not [name for name, _ in imports("testing/order.py") if name.split(".")[0] in ("streamloader", "numpy")]


def lines_of(nodes: Iterable[ast.AST]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("left_out", ["functions", "types"])
def test_no_modules_import_each_other_in_a_circle(left_out):
    """Neither when they are imported, nor later, by a function; only types may be of a module that imports this one."""

    def imported(module: str) -> Iterator[str]:
        nodes = [node for _, node in functions(module)]
        if left_out == "types":
            checks = (node for node in ast.walk(tree(module)) if isinstance(node, ast.If))
            nodes = [node for node in checks if ast.unparse(node.test) == "TYPE_CHECKING"]
        left = lines_of(nodes)
        for path in (name.split(".")[1:] for name, line in imports(module) if line not in left):
            ways = ("/".join(each) + end for each in (path, path[:-1]) for end in (".py", "/__init__.py"))
            yield from [way for way in ways if way in MODULES][:1]

    graph = {module: set(imported(module)) for module in MODULES}
    assert "storage/objects.py" in graph["storage/store.py"]
    TopologicalSorter(graph).prepare()  # its error names the circle


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_pickled_by_hand(module):
    for name, line in imports(module):
        assert name.split(".")[0] not in PICKLING or module in MAY_PICKLE, f"{module}:{line} imports {name}"
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given.get("allow_pickle", "False") == "False", f"{module}:{node.lineno} allows pickles"
            if ast.unparse(node.func) == "torch.load":
                assert given.get("weights_only") == "True", f"{module}:{node.lineno} may unpickle anything"


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_documented_and_annotated(module):
    assert ast.get_docstring(tree(module)) or module == "cli/__init__.py", f"{module} has no docstring"
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}:{node.lineno} class {node.name} has no docstring"
    for name, node in functions(module):
        assert node.returns is not None, f"{module}:{node.lineno} {name} does not say what it returns"
        nested = any(part[:1].islower() for part in name.split(".")[:-1])
        if not nested and not any(part.startswith("_") for part in name.split(".")):
            declared = any(name.endswith(method) for method in protocol_methods())
            assert declared or ast.get_docstring(node), f"{module}:{node.lineno} {name} has no docstring"


@pytest.mark.parametrize("module", MODULES)
def test_callbacks_of_weak_references_run_no_python_code(module):
    """What a signal handler raises in one is printed and dropped, and so is what it raises in `__del__`."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef):
            assert node.name != "__del__", f"{module}:{node.lineno} has __del__"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "weakref.ref" and node.args[1:]:
            assert ast.unparse(node.args[1]).endswith(".append"), f"{module}:{node.lineno} may call Python code"
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("weakref.finalize", "finalize"), (
                f"{module}:{node.lineno}: use Finalizer"
            )


def test_no_file_names_a_machine():
    pattern = re.compile(rb"(?<![\w.:])/(?:home|root|work|Users|builds|mnt)/\w")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.decode().split("\0"):
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".json", ".yml", ""} and path.is_file():
            for number, line in enumerate(path.read_bytes().splitlines(), 1):
                assert not pattern.search(line), f"{name}:{number} has a path of one machine"


IMPORTS = """
import os, sys, threading, streamloader as sl
sl.Layout, sl.Shuffle, sl.errors
heavy = {'torch', 'fsspec', 's3fs', 'obstore', 'zarr', 'botocore', 'aiohttp', 'click', 'rich'}
print(sorted(heavy & set(sys.modules)), threading.active_count(), len(os.listdir('/proc/self/task')))
sl.open, sl.Dataset, sl.Writer, sl.Field, sl.convert, sl.Stats
print('torch' in sys.modules)
next(iter(sl.StreamingDataset(sys.argv[1], batch_size=8)))
rare = ['order.mixture', 'order.selection', 'format.conditions', 'images.decode', 'storage.s3', 'storage.object_store']
print('torch' in sys.modules, [name for name in rare if f'streamloader.{name}' in sys.modules])
"""

EVERY_MODULE = """
import importlib, pkgutil, threading, streamloader as sl
for info in pkgutil.walk_packages(sl.__path__, 'streamloader.'):
    if not info.name.endswith('__main__'):
        importlib.import_module(info.name)
print([thread.name for thread in threading.enumerate()])
print([name for name in sl.__all__ if type(getattr(sl, name)).__name__ == 'module'])
"""


@pytest.mark.python
def test_each_step_imports_only_what_it_needs_and_starts_nothing(data):
    assert run_python("-c", IMPORTS, data(64, "x", "label")).stdout.splitlines() == ["[] 1 1", "False", "True []"]


@pytest.mark.python
def test_importing_every_module_starts_no_thread_and_hides_no_public_name():
    assert run_python("-c", EVERY_MODULE).stdout.splitlines() == ["['MainThread']", "['errors']"]


@pytest.mark.parametrize("module", [each for each in MODULES if stage(each) in ("order", "engine", "zarr", "images")])
def test_threads_that_may_outlive_the_interpreter_hash_no_arrays(module):
    """`np.unique(x)` aborts the process then: `distinct` of `order/epoch_order.py` sorts instead."""
    calls = [node for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]
    for call in (each for each in calls if ast.unparse(each.func) == "np.unique"):
        assert call.keywords, f"{module}:{call.lineno} np.unique without return_index, return_inverse or return_counts"
