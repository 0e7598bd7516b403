"""What a release consists of: complete archives, a wheel that works in empty environments, its size and its SBOM."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_docs import README, blocks

import streamloader as sl

ROOT = Path(__file__).parent.parent.parent
PYTHONS = ["3.11", "3.12", "3.13", "3.14", "3.13t", "3.14t"]
MOST_BYTES = 150_000_000  # besides torch and what it needs
NO_TOUCH = {"PYTHONPATH": None, "PYTHONDONTWRITEBYTECODE": "1"}


def finish(*command, cwd=None, limit=300, **environment):
    """Run a command, whose error is the failure, and return the process with what it printed."""
    variables = {**os.environ, **NO_TOUCH, **environment}
    variables = {name: value for name, value in variables.items() if value is not None}
    command = [str(part) for part in command]
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def run(*command, **options):
    return finish(*command, **options).stdout


def build(source, out, *what, **environment):
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *what, source, **environment)
    return sorted(out.iterdir())


def contents(archive):
    """The hash of each file of a wheel or an sdist, by its path below the top folder of an sdist."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as files:
            return {name: hashlib.sha256(files.read(name)).hexdigest() for name in files.namelist()}
    found = {}
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            if member.isfile():
                path = member.name.partition("/")[2]
                found[path] = hashlib.sha256(files.extractfile(member).read()).hexdigest()
    return found


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The sdist and the wheel of the working tree, with files of pages that are nested."""
    folder = tmp_path_factory.mktemp("release")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for path in filter(None, listed):
        if (ROOT / path).is_file() and path.split("/")[0] not in ("bench", "docs", "formats"):
            (folder / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / "tree" / path)
    (folder / "tree" / "streamloader" / "view" / "static" / "nested").mkdir(parents=True)
    (folder / "tree" / "streamloader" / "view" / "static" / "nested" / "page.js").touch()
    (folder / "tree" / "streamloader" / "format" / "_rows.abi3.so").touch()  # of an editable installation
    sdist, wheel = sorted(build(folder / "tree", folder / "dist"), key=lambda path: path.suffix)
    return sdist, wheel


def test_the_archives_have_all_files_and_no_others(archives):
    sdist, wheel = archives
    sources, files = set(contents(sdist)), set(contents(wheel))
    kinds = ("**/*.py", "*/static/**/*", "*/templates/**/*", "*/*.pyi")
    found = [path for kind in kinds for path in (ROOT / "streamloader").glob(kind)]
    same = {str(path.relative_to(ROOT)) for path in found if path.is_file()}
    same |= {"streamloader/py.typed", "streamloader/view/static/nested/page.js"}
    assert same - files == set()
    top = {"LICENSE", "README.md", "pyproject.toml", "setup.py", "streamloader/format/_rows.c"}
    assert (same | top) - sources == set()
    assert not [path for path in sources if path.endswith(".so") or path.startswith(("tests/", "docs/", "bench/"))]
    others = {path for path in files - same if not path.startswith(f"streamloader-{sl.__version__}.dist-info/")}
    binaries = {f"streamloader/{name}" for name in ("format/_rows.abi3.so", "order/_packing.abi3.so")}
    assert others == binaries | {"streamloader/format/_rows.c", "streamloader/order/_packing.c"}
    assert re.fullmatch(rf"streamloader-{re.escape(sl.__version__)}-cp311-abi3-\w+\.whl", wheel.name)


def test_the_sdist_builds_the_same_archives_again(archives, tmp_path):
    with tarfile.open(archives[0]) as files:
        files.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    again = sorted(build(tree, tmp_path / "dist"), key=lambda path: path.suffix)
    ignored = {"streamloader.egg-info/SOURCES.txt": ""}  # lists the setup.cfg that the first build wrote
    for first, second in zip(archives, again, strict=True):
        assert contents(first) | ignored == contents(second) | ignored, first.name


def interpreter(version):
    """A Python of this version that is here, or None."""
    found = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/*/bin/python{version}"))]
    asked = "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED'))"
    for path in filter(None, found):
        done = subprocess.run([path, "-c", asked], capture_output=True, text=True, check=False)
        number, _, free_threaded = done.stdout.strip().partition(" ")
        if number + "t" * (free_threaded == "1") == version:
            return path
    return None


def install(python, folder, wheel, *, empty):
    """A new environment with the wheel; unless `empty`, what it needs is found in this environment."""
    run(python, "-m", "venv", "--without-pip", folder)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-compile"]
    if empty:
        pip += ["--constraint", ROOT / "constraints.txt"]
        run(*pip, "--no-deps", "torch", limit=900)
        run(folder / "bin" / "python", ROOT / "tests" / "torch_without_cuda.py")  # a build for the CPU stays as it is
        run(*pip, wheel, limit=900)
    else:
        run(*pip, "--no-deps", wheel)
        (packages,) = (folder / "lib").glob("python3*/site-packages")
        (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def try_out(programs, folder):
    """Convert photographs, and train by the script of the README, as a user does; return what training printed."""
    rng = np.random.default_rng(0)
    for number in range(40):
        path = folder / "photos" / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), np.uint8)).save(path)
    assert sl.__version__ in run(programs / "streamloader", "--version", cwd=folder)
    convert = ("convert", "photos", "dataset", "--split", "train=0.9,val=0.1")
    assert "Warning" not in finish(programs / "streamloader", *convert, cwd=folder).stderr
    script = next(block.code for block in blocks(README) if block.language == "python")
    smaller = {"s3://my-bucket/photos": "dataset", "batch_size=256": "batch_size=8", "(224, 224)": "(32, 32)"}
    for old, new in smaller.items():
        assert old in script
        script = script.replace(old, new)
    end = "\nimport sys; from streamloader.format import rows; print(sl.__file__, rows.copy, sys.prefix)\n"
    (folder / "train.py").write_text(script + end)
    return run(programs / "python", "train.py", cwd=folder)


def test_the_wheel_converts_and_trains_from_the_readme(archives, tmp_path):
    programs = install(sys.executable, tmp_path / "env", archives[1], empty=False)
    printed = try_out(programs, tmp_path)
    assert f"{tmp_path}/env/lib" in printed, "the package is not the one of the wheel"
    assert "built-in function copy" in printed


@pytest.mark.long
def test_a_wheel_that_was_built_without_a_compiler_converts_and_trains(archives, tmp_path):
    with tarfile.open(archives[0]) as files:
        files.extractall(tmp_path, filter="data")
    (wheel,) = build(next(tmp_path.iterdir()), tmp_path / "dist", "--wheel", CC="no-such-compiler")
    assert not [path for path in contents(wheel) if path.endswith(".so")]
    printed = try_out(install(sys.executable, tmp_path / "env", wheel, empty=False), tmp_path)
    assert "<function _copy" in printed


@pytest.fixture(scope="module")
def environments():
    """The environments by version, which later tests measure."""
    return {}


@pytest.mark.long
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_works_in_an_empty_environment_within_its_size(version, archives, environments, tmp_path_factory):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    folder = tmp_path_factory.mktemp(f"python{version}")
    source = archives[1] if not version.endswith("t") else archives[0]  # no abi3 there
    programs = install(python, folder / "env", source, empty=True)
    environments[version] = programs
    assert f"{folder}/env/lib" in try_out(programs, folder)
    sizes = measure(programs, folder)
    print(version, sum(sizes.values()), sizes)
    assert sum(sizes.values()) <= MOST_BYTES, sizes


def measure(programs, folder):
    """The bytes of each package that the default installation adds to torch."""
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "--no-deps"]
    run(*pip, "--target", folder / "packaging", "packaging")
    command = [programs / "python", ROOT / "tests" / "installed_size.py", "streamloader", "torch"]
    return json.loads(run(*command, PYTHONPATH=str(folder / "packaging")))


@pytest.mark.long
def test_the_page_says_the_size_of_each_package(environments, tmp_path):
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version not in environments:
        pytest.skip("measured after the installation")
    sizes = measure(environments[version], tmp_path)
    page = (ROOT / "docs" / "install.md").read_text()
    total = float(re.search(r"adds (\d+) MB to PyTorch", page)[1])
    assert total == pytest.approx(sum(sizes.values()) / 1e6, abs=3), sizes
    table = page[page.index("| package | MB") :]
    for names, shown in re.findall(r"^\| ([\w\-, ]+?) \| ([\d.]+) \|", table, re.MULTILINE):
        parts = [name.lower() for name in re.split(r", with |, | and ", names) if name.lower() in sizes]
        if parts:
            assert float(shown) == pytest.approx(sum(sizes[name] for name in parts) / 1e6, abs=1), names


@pytest.mark.long
def test_the_sbom_names_each_package_with_its_version_and_license(environments, tmp_path):
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version not in environments:
        pytest.skip("made of the installation")
    recipe = (ROOT / "Makefile").read_text()
    options = re.search(r"cyclonedx-py environment (.*) -o ", recipe)[1].split()
    project = tmp_path / "sbom.toml"
    settings = re.sub(r"(?m)^dynamic = .*$", f'version = "{sl.__version__}"', (ROOT / "pyproject.toml").read_text())
    project.write_text(settings)
    options[options.index("build/sbom.toml")] = str(project)
    command = [sys.executable, "-m", "cyclonedx_py", "environment", *options, "-o", tmp_path / "sbom.json"]
    run(*command, environments[version] / "python")
    text = (tmp_path / "sbom.json").read_text()
    document = json.loads(text)
    root = document["metadata"]["component"]
    assert (document["bomFormat"], root["name"], root["version"]) == ("CycloneDX", "streamloader", sl.__version__)
    components = {each["name"].lower().replace("_", "-"): each for each in document["components"]}
    needed = json.loads(run(environments[version] / "python", "-c", INSTALLED))
    assert {name: each["version"] for name, each in components.items()} == needed
    for name, each in components.items():
        assert each.get("licenses"), f"{name} has no license"
    assert "file:" not in text
    assert str(tmp_path) not in text


INSTALLED = """
import json
from importlib.metadata import distributions
found = {each.metadata["Name"].lower().replace("_", "-"): each.version for each in distributions()}
print(json.dumps({name: version for name, version in found.items() if name != "streamloader"}))
"""
