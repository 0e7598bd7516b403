"""The public face: what `import streamloader as sl` gives, pinned."""

import inspect
from importlib.metadata import entry_points, version

import pytest

import streamloader as sl

NAMES = {
    *("open", "Dataset", "Writer", "Field", "Layout", "convert", "StreamingDataset", "Shuffle", "Decode"),
    *("Stats", "errors", "__version__", "Mixture", "Source", "RetryPolicy", "verify", "append", "export"),
    *("Window", "Patch", "Channels", "NumpyDataset", "log", "diff", "add_columns", "Pad", "delete", "Pack"),
    *("Clips", "Join", "to_device", "jax_batches", "tf_dataset", "Cache", "LossLog"),
}


def test_public_names_are_pinned():
    assert set(sl.__all__) == NAMES
    assert set(sl.__all__) <= set(dir(sl))
    assert len(NAMES) <= 35


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_public_name_is_there_and_documented(name):
    assert inspect.getdoc(getattr(sl, name)), f"sl.{name} has no documentation"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        _ = sl.opne  # type: ignore[attr-defined]


def test_version_is_that_of_the_installed_package():
    assert sl.__version__ == version("streamloader")


def test_streaming_dataset_takes_what_was_promised():
    parameters = inspect.signature(sl.StreamingDataset).parameters
    assert {name: p.default for name, p in parameters.items() if p.default is not p.empty} == {
        **{"fields": None, "split": None, "shuffle": True, "seed": 0, "remainder": "pad", "decode": None, "pack": None},
        **{"transform": None, "num_workers": "auto", "with_index": False, "world": None, "memory": None},
        **{"on_batch": None, "storage_options": None, "where": None, "skip_steps": None, "steps_per_epoch": None},
        **{"sample_axis": None, "windows": None, "patches": None, "channels": None, "decode_cf": True, "strict": None},
        **{
            "normalize": None,
            "version": None,
            "zarr_format": None,
            "exclude": None,
            "weights": None,
            "replacement": True,
        },
        **{
            "on_error": "raise",
            "max_bad": 0.01,
            "error_log": None,
            "stall_seconds": 120.0,
            "collate": None,
            "bucket_by": None,
            "bucket_steps": 100,
            "max_tokens": None,
            "clips": None,
        },
        **{"device": None, "ahead": 2, "cast": None, "graph_buffers": False, "cache": None},
    }
    assert [name for name, p in parameters.items() if p.default is p.empty] == ["url", "batch_size"]
    assert [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY] == ["url"]


def test_open_takes_what_was_promised():
    parameters = inspect.signature(sl.open).parameters
    assert list(parameters) == ["url", "split", "version", "storage_options", "cache"]


def test_append_takes_what_convert_does():
    convert, append = (inspect.signature(function).parameters for function in (sl.convert, sl.append))
    shared = set(append) - {"url"}
    assert {name: append[name].default for name in shared} == {name: convert[name].default for name in shared}
    assert list(inspect.signature(sl.verify).parameters) == [
        *("url", "split", "decode", "against", "format", "storage_options", "source_options", "progress")
    ]
    assert list(inspect.signature(sl.export).parameters) == [
        *("url", "dst", "format", "fields", "split", "storage_options", "target_options", "progress")
    ]


def test_every_error_has_a_code_of_its_own():
    codes = [getattr(sl.errors, name).code for name in sl.errors.__all__]
    assert len(set(codes)) == len(codes)


def test_the_console_script_is_there():
    (script,) = entry_points(group="console_scripts", name="streamloader")
    assert script.value == "streamloader.cli.main:main"
    assert callable(script.load())
