"""The tutorials: each script trains a model from nothing, and its page shows the script and says what it prints.

A script `examples/tutorials/NAME.py` and its page `docs/tutorials/NAME.md` are found by their names. The last line that
a script prints compares its model with a baseline: "test accuracy 0.95, most frequent class 0.13", or a loss, an error
or a perplexity, of which less is better. It draws a figure NAME.png, of which the page has a copy.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import numpy as np
import pytest
from PIL import Image
from servers import S3Server
from test_docs import INSTALL, LINK, ROOT, blocks
from torchrun import environment

SCRIPTS = sorted((ROOT / "examples" / "tutorials").glob("*.py"))
RESULT = re.compile(r"^test ([a-z -]+) ([0-9.]+)(?: K)?, ([\w -]+?) ([0-9.]+)(?: K)?$", re.MULTILINE)
LESS_IS_BETTER = ("loss", "error", "perplexity")

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def page_of(script: Path) -> Path:
    return ROOT / "docs" / "tutorials" / f"{script.stem}.md"


def run(command: str, folder: Path, **variables: str) -> str:
    """Run a command of a page in a folder that has the examples, and return what it printed."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given = environment() | {"PATH": path, "MPLBACKEND": "Agg"} | variables
    bash = ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(bash, cwd=folder, env=given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
    return done.stdout


def pattern_of(output: str) -> str:
    """What a page says is printed: `...` is anything, and a number with a decimal point any such number."""
    escaped = re.escape(output.strip()).replace(r"\.\.\.", ".*?")
    return re.sub(r"\d+\\\.\d+", r"\\d+[.]\\d+", escaped)


def check_result(printed: str) -> None:
    """The model has at most three quarters of the error of the baseline."""
    results = RESULT.findall(printed)
    assert results, printed
    measure, model, _, baseline = results[-1]
    if measure.endswith(LESS_IS_BETTER):
        error, simple = float(model), float(baseline)
    else:
        error, simple = 1 - float(model), 1 - float(baseline)
    assert error <= 0.75 * simple, results[-1]


def figure_of(script: Path, folder: Path) -> Image.Image:
    """The figure that the script drew in a folder: not tiny, and not of one colour."""
    [path] = folder.glob(f"*/{script.stem}.png")
    image = Image.open(path).convert("RGB")
    assert image.width >= 500 and image.height >= 200
    assert len(image.getcolors(image.width * image.height) or []) > 10
    return image


@each_script
def test_a_tutorial_trains_a_model_from_nothing_and_prints_what_its_page_says(script, tmp_path):
    page = blocks(page_of(script))
    commands = [block for block in page if block.language == "bash"]
    assert any(f"python examples/tutorials/{script.name}" in block.code for block in commands)
    printed = []
    for block in commands:
        printed.append(run(INSTALL.sub("true", block.code), tmp_path))
        if block.output is not None:
            assert re.fullmatch(pattern_of(block.output), printed[-1].strip(), re.DOTALL), f"{block}\n{printed[-1]}"
    shown = [pattern_of(block.output) for block in page if block.language == "python" and block.output is not None]
    assert re.search(".*".join(shown), "".join(printed), re.DOTALL), "".join(printed)
    check_result("".join(printed))
    drawn = figure_of(script, tmp_path)
    with Image.open(ROOT / "docs" / "tutorials" / "images" / f"{script.stem}.png") as committed:
        assert committed.size == drawn.size, "copy the figure that the script draws"


@each_script
def test_the_code_of_a_page_is_that_of_its_script(script):
    text, end = "\n" + script.read_text(), 0
    shown = [block.code for block in blocks(page_of(script)) if block.language == "python"]
    assert shown
    for code in shown:
        # functions and classes are where the page explains them, and other lines in the order of the script
        anywhere = "\n" + code in text or code.startswith(("def ", "class ", "@"))
        begin = 0 if anywhere else end
        found = max(text.find("\n" + indent(code, " " * spaces), begin) for spaces in (0, 4, 8, 12))
        assert found >= 0, f"the script has no such lines after those of the block before:\n{code}"
        end = end if anywhere else found + 1


@each_script
def test_a_page_shows_its_figure_on_white_and_links_to_other_pages(script):
    page = page_of(script)
    text = page.read_text()
    assert f"(images/{script.stem}.png)" in text
    figure = page.parent / "images" / f"{script.stem}.png"
    assert figure.stat().st_size < 80_000
    with Image.open(figure) as image:
        assert image.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)
    assert [target for target in LINK.findall(text) if target.startswith("../")]


@pytest.mark.quick(1)
@each_script
def test_a_tutorial_trains_from_a_bucket(script, moto: S3Server, tmp_path):
    url = moto.url(script.stem)
    printed = run(f"python examples/tutorials/{script.name} --url {url}", tmp_path, **moto.env)
    assert url in printed
    check_result(printed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "step", "epochs"), [("photographs.py --epochs 5", 90, 5), ("microscopy.py --url {url}", 30, 8)]
)
def test_the_losses_of_a_killed_run_are_those_of_one_that_was_not_killed(command, step, epochs, moto, tmp_path):
    command = "python examples/tutorials/" + command.format(url=moto.url("nuclei.zarr"))
    whole = re.findall("^epoch .*$", run(f"{command} --out whole", tmp_path, **moto.env), re.MULTILINE)
    killed = run(f"{command} --kill-at {step} || {command}", tmp_path, **moto.env)
    assert len(whole) == epochs
    assert "resumed at step" in killed
    assert re.findall("^epoch .*$", killed, re.MULTILINE) == whole


def test_photographs_of_ones_own_train_without_the_bad_file_among_them(tmp_path):
    random = np.random.default_rng(0)
    for number in range(40):
        path = tmp_path / "mine" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (40, 50, 3), np.uint8)).save(path)
    path.with_name("bad.png").write_bytes(b"no image")
    printed = run("python examples/tutorials/photographs.py --photos mine --out my-run --epochs 1", tmp_path)
    assert "40 photographs in my-run/dataset\nbad files skipped: 1\n" in printed
    assert "test accuracy" in printed
