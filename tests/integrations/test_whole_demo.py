"""`streamloader demo` from end to end: too long for the main suite, and the first thing that a new user tries."""

from test_demo import run_demo


def test_the_demo_passes_and_leaves_nothing(tmp_path):
    done = run_demo(env={"TMPDIR": str(tmp_path)})
    logs = [path.read_text(errors="replace")[-6000:] for path in tmp_path.glob("*/*.log")]  # kept by a demo that failed
    assert done.returncode == 0, "\n".join([done.stdout[-1000:], done.stderr[-1000:], *logs])
    assert "exactly once" in done.stdout
    assert "val accuracy 9" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_failed_demo_keeps_the_log_that_it_names(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'LOCAL_RANK' in os.environ: sys.exit('SomeError: this rank is ill')\n"  # torchrun's children alone
    )
    (tmp_path / "temporary").mkdir()
    done = run_demo(env={"TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    (log,) = (tmp_path / "temporary").glob("*/first.log")
    assert f"see {log}" in done.stderr
    assert "SomeError: this rank is ill" in log.read_text()
