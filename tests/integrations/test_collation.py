"""The recipe of docs/collation.md that needs torchvision trains."""

import re
import sys

import pytest
from torchrun import TESTS

PAGE = (TESTS.parent / "docs" / "collation.md").read_text()


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_detector_learns_from_images_and_boxes_of_many_sizes(workers, tmp_path, monkeypatch):
    write = re.search(r"```python\n(import io\n.*?)```", PAGE, re.DOTALL)[1]
    recipe = re.search(r"```python\n# detection\.py\n(.*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "detection.py").write_text(f"import torchvision_of_any_build\n{recipe}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "detection", raising=False)
    url = f"{tmp_path}/captions"
    exec(compile(write.replace("s3://my-bucket/captions", url), "collation.md", "exec"), {})
    import torch
    from detection import train

    torch.manual_seed(0)
    losses = train(url, 60, num_workers=workers)
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
