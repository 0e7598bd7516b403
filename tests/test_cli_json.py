"""`--json` of every command: one document on stdout, also of an error."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
from cli_page import KEYS, PAGE, head, keys, sections
from commands import run
from conversions import write_photos

import streamloader as sl
from streamloader.cli.main import cli, main


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """What the commands below take."""
    root = tmp_path_factory.mktemp("json")
    write_photos(root / "photos", {"ant": 20, "bee": 20}, lambda i: (24, 24 + i % 7))
    np.save(root / "x.npy", np.arange(40))
    np.save(root / "added.npy", np.arange(40.0))
    for name in ("data", "changed"):
        sl.convert(root / "photos", root / name, workers=0)
    out = sl.Writer(root / "left", {"x": "int64"})
    out.write({"x": 1})
    for _ in sl.NumpyDataset(root / "data", batch_size=8, cache=sl.Cache(root / "cache", "1GiB"), num_workers=0):
        pass
    (root / "full").mkdir()
    (root / "full" / "note").touch()
    return root


# what is run; in this order: some change what is there
CALLS = {
    "convert": ["convert", "{0}/x.npy", "{0}/x", "--workers", "0"],
    "convert --dry-run": ["convert", "{0}/x.npy", "{0}/y", "--dry-run"],
    "append": ["append", "{0}/x", "{0}/x.npy", "--workers", "0"],
    "append --abandon": ["append", "{0}/x", "--abandon"],
    "delete": ["delete", "{0}/changed", "--where", "label == 1"],
    "lengths": ["lengths", "{0}/data"],
    "log": ["log", "{0}/x"],
    "diff": ["diff", "{0}/x", "1", "2"],
    "inspect": ["inspect", "{0}/data"],
    "verify": ["verify", "{0}/data"],
    "export": ["export", "{0}/x", "{0}/exported", "--format", "npz"],
    "rm-incomplete": ["rm-incomplete", "{0}/left", "--yes"],
    "ls": ["ls", "{0}"],
    "cp": ["cp", "{0}/data", "{0}/copied"],
    "cache": ["cache", "{0}/cache"],
    "cache --clear": ["cache", "{0}/cache", "--clear", "all"],
    "plan": ["plan", "{0}/data"],
    "bench": ["bench", "{0}/data", "--seconds", "0.1"],
    "stats": ["stats", "{0}/x"],
    "doctor": ["doctor", "{0}/data"],
    "completion": ["completion", "bash"],
}
# demo takes a minute: tests/integrations/test_whole_demo.py; view serves until it is ended: tests/test_view.py
FAILS = {"demo": ["demo", "--keep", "{0}/full"], "view": ["view", "{0}/nowhere", "--no-browser"]}


def test_every_command_has_the_option_and_is_tried_here():
    without = [name for name, command in cli.commands.items() if "--json" not in str([p.opts for p in command.params])]
    assert without == []
    assert {call.split()[0] for call in (*CALLS, *FAILS)} == set(cli.commands)


def filled(arguments, there):
    return [argument.format(there) for argument in arguments] + ["--json"]


@pytest.fixture(scope="module")
def outcomes(there):
    """The status, the output and the errors of each call."""
    found = {}
    for call, arguments in CALLS.items():
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main(filled(arguments, there))
        found[call] = ended.value.code or 0, out.getvalue(), err.getvalue()
    return found


@pytest.mark.parametrize("call", CALLS)
def test_a_command_prints_one_document_and_nothing_else(call, outcomes):
    status, out, err = outcomes[call]
    assert status == 0, err
    json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# keys that depend on what the command finds, which no call above has
RARE = {"inspect": {"arrays", "reads", "rechunking"}}


@pytest.mark.parametrize("name", cli.commands)
def test_the_page_has_the_options_of_each_command_and_the_keys_of_its_document(name, outcomes):
    """`python tests/cli_page.py` writes the options; the keys are written by hand."""
    page = sections(PAGE.read_text())
    assert head(cli.commands[name]) in page[name], f"{name} has changed: run python tests/cli_page.py"
    documented, printed = keys(page[name]), set()
    if "keys of [append]" in page[name]:
        documented |= keys(page["append"]) - {"abandoned"}
    for call in [each for each in CALLS if each.split()[0] == name]:
        document = json.loads(outcomes[call][1])
        printed |= set(document[0] if isinstance(document, list) else document)
    assert name in FAILS or documented == printed | RARE.get(name, set())


def test_the_page_has_no_command_that_is_gone():
    page = PAGE.read_text()
    assert page.count(KEYS) == len(sections(page)) == len(cli.commands)


@pytest.mark.parametrize("name", cli.commands)
def test_an_error_is_a_document_too(name, there, capsys):
    """Of a wrong option, and of what the command finds."""
    calls = [[name, "--nonsense"]]
    if name in FAILS:
        calls.append([each.format(there) for each in FAILS[name]])
    elif name != "completion":
        calls.append([part.format(there).replace(str(there), f"{there}/nowhere") for part in CALLS[name]])
    for arguments in calls:
        status, out, err = run(capsys, *arguments, "--json")
        document = json.loads(out)
        if "error" not in document:  # of nothing there is nothing to remove, and `doctor` says what is wrong
            assert (name, status) in (("rm-incomplete", 0), ("doctor", 1))
            continue
        assert status == 2
        assert document.keys() == {"error"}
        assert document["error"].keys() == {"code", "message"}
        assert document["error"]["code"].startswith("SL")
        assert err.endswith(f"error: {document['error']['message']}\n")


def test_numbers_that_json_lacks_are_null(capsys):
    from streamloader.cli.show import print_json

    print_json({"a": [float("nan"), 1.5], "b": {"c": float("inf")}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}


def test_what_would_be_removed_needs_consent_with_json_too(tmp_path, capsys):
    sl.Writer(tmp_path / "left", {"x": "int64"})
    status, out, _ = run(capsys, "rm-incomplete", tmp_path / "left", "--json")
    assert (status, "--yes" in json.loads(out)["error"]["message"]) == (2, True)
    assert (tmp_path / "left" / "_streamloader/job.json").exists()


def test_a_json_that_is_an_argument_is_not_the_option(capsys):
    status, out, _ = run(capsys, "inspect", "--", "--json")
    assert (status, out) == (2, "")


HELD = """
import sys, time
from streamloader.cli import main, datasets
from streamloader.maintenance import versions
def held(*_, **__):
    print("held", file=sys.stderr, flush=True)
    time.sleep(300)
versions.log = held
from streamloader.cli.show import display
def log(**_):
    with display():
        held()
main.cli.commands["log"].callback = log
main.main()
"""


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_a_document_of_its_own(tmp_path):
    command = [sys.executable, "-c", HELD, "log", "nowhere", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "held\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert json.loads(out)["error"]["code"] == "interrupted"


# --- completion

BASH = """
eval "$(streamloader completion bash)"
COMP_WORDS=({words}); COMP_CWORD={last}
_streamloader_completion streamloader
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def with_program(tmp_path):
    """The environment of a shell that finds the program."""
    program = tmp_path / "bin" / "streamloader"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m streamloader.cli.main "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}


COMPLETED = {
    "streamloader ex": "export",
    "streamloader export --form": "--format",
    "streamloader export --format par": "parquet",
    "streamloader completion f": "fish",
}


def shell(name, script, tmp_path):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    options = {"bash": ["--norc"], "zsh": ["-f", "-i"], "fish": ["--no-config"]}[name]
    command = [name, *options, "-c", script]
    done = subprocess.run(command, env=with_program(tmp_path), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.quick(1)
@pytest.mark.parametrize("typed", COMPLETED)
def test_bash_completes_commands_options_and_choices(typed, tmp_path):
    script = BASH.format(words=typed, last=len(typed.split()) - 1)
    assert shell("bash", script, tmp_path) == [COMPLETED[typed]]


def test_bash_completes_local_paths(tmp_path):
    script = 'compopt() { echo "compopt $*"; }' + BASH.format(words="streamloader inspect phot", last=2)
    assert shell("bash", script, tmp_path) == ["compopt", "-o", "default"], "bash then completes file names itself"


@pytest.mark.long
@pytest.mark.parametrize("typed", COMPLETED)
def test_fish_completes_commands_options_and_choices(typed, tmp_path):
    script = f'streamloader completion fish | source; complete -C "{typed}"'
    assert shell("fish", script, tmp_path)[0] == COMPLETED[typed]


@pytest.mark.long
@pytest.mark.parametrize("typed", COMPLETED)
def test_zsh_completes_commands_options_and_choices(typed, tmp_path):
    """Its completions are given to `compadd`, which is replaced: only an interactive line would show them."""
    script = """
    autoload -Uz compinit; compinit -u -d $HOME/dump
    eval "$(streamloader completion zsh)"
    _describe() {{ eval 'print -l -- ${{(P)3}}'; print -l -- ${{(P)@[-1]}} ${{(P)2}} }}
    compadd() {{ local last=$@[-1]; print -l -- ${{(P)last}} }}
    words=({words}); CURRENT={current}
    _streamloader_completion
    """
    filled_in = script.format(words=typed, current=len(typed.split()))
    found = shell("zsh", filled_in, tmp_path)
    assert any(each.partition(":")[0] == COMPLETED[typed] for each in found), found


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_scripts_ask_by_the_protocol_of_click(name, capsys):
    status, script, _ = run(capsys, "completion", name)
    assert status == 0 and f"_STREAMLOADER_COMPLETE={name}_complete" in script
    env = {**os.environ, "_STREAMLOADER_COMPLETE": f"{name}_complete"}
    env |= {"COMP_WORDS": "streamloader verify --js", "COMP_CWORD": "--js" if name == "fish" else "2"}
    code = "import sys; from streamloader.cli.main import main\ntry: main()\nfinally: print(sorted({'torch', 'numpy', "
    code += "'fsspec', 'rich', 'botocore', 'zarr'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "--json" in done.stdout and done.stdout.endswith("[]\n"), "completion imports nothing that takes long"
