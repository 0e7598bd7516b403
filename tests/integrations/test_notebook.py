"""What a notebook shows: IPython's own display of datasets and batches."""

import numpy as np
import pytest

import streamloader as sl

shell = pytest.importorskip("IPython.core.interactiveshell")


@pytest.fixture
def displayed():
    """Returns what IPython shows of a value, by type."""
    ipython = shell.InteractiveShell()
    ipython.run_line_magic("load_ext", "streamloader")
    yield lambda value: ipython.display_formatter.format(value)[0]
    ipython.history_manager.end_session()
    shell.InteractiveShell.clear_instance()


def test_a_batch_is_shown_as_html_and_another_dict_as_text(displayed, tmp_path):
    with sl.Writer(tmp_path / "d", {"x": "float32[64]", "name": "text"}) as writer:
        for i in range(20):
            writer.write({"x": np.arange(64) * i, "name": f"<b>{i}"})
    dataset = sl.StreamingDataset(str(tmp_path / "d"), batch_size=4, shuffle=False)
    assert "<td>float32[64]</td>" in displayed(dataset)["text/html"]
    assert "epoch 0, step 1" in displayed(dataset.show(step=1))["text/html"]
    html = displayed(next(iter(dataset)))["text/html"]
    assert html.count("<polyline") == 4
    assert "&lt;b&gt;3" in html
    for other in ({}, {"a": 1}, {1: np.zeros(3)}, {"a": "b", "c": [1, 2]}):
        assert set(displayed(other)) == {"text/plain"}
