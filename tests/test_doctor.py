"""`streamloader doctor`: each check on what it is for, a remedy for each problem, and no secret in any of them."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import zarr
from commands import COMMAND, run
from datasets import write
from faulty import QuietHandler, QuietServer, certified

from streamloader.measure import doctor
from streamloader.measure.doctor import Check, examine, memory_available
from streamloader.storage.endpoint import clock_skew
from streamloader.storage.process import cpu_quota
from streamloader.storage.url import MASK
from streamloader.testing import Fault, FaultProxy

SECRET = "wJalrXUtnFEMIsecretsecret"


def found(url, options=None):
    """The checks of a URL by name."""
    return {check.name: check for check in examine(url, options)}


def problems(checks):
    return {name: check for name, check in checks.items() if check.status == "problem"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor") / "data"
    write(folder, 40, ["x", "label"])
    return folder


@pytest.fixture(scope="module")
def bucket(moto, data):
    """The URL and the options of the same dataset in a bucket."""
    from streamloader.maintenance.copy import copy

    url = moto.url("doctor")
    copy(data, url, target_options=moto.storage_options)
    return url, moto.storage_options


# --- the command


def test_a_healthy_dataset_is_a_table_and_status_0(data, capsys):
    status, shown, err = run(capsys, "doctor", data)
    assert (status, err) == (0, "")
    for words in ("streamloader", "torch", "version 1, 40 samples", "for a read of one byte", 'num_workers="auto"'):
        assert words in shown
    status, shown, _ = run(capsys, "doctor", data, "--json")
    document = json.loads(shown)
    assert (status, document["ok"]) == (0, True)
    assert {tuple(check) for check in document["checks"]} == {("name", "status", "found", "advice")}
    assert {check["status"] for check in document["checks"]} <= {"ok", "warning", "problem"}


def test_a_problem_is_status_1_with_its_remedy(tmp_path, capsys):
    status, shown, _ = run(capsys, "doctor", tmp_path / "nothing")
    assert status == 1
    assert "there is no dataset at" in " ".join(shown.split())
    assert "problem: dataset: check the URL and the storage_options" in shown
    assert shown.splitlines()[-1].startswith("1 problem")
    status, shown, _ = run(capsys, "doctor", tmp_path / "nothing", "--json")
    assert (status, json.loads(shown)["ok"]) == (1, False)
    assert run(capsys, "doctor", "s3:typo")[0] == 2, "a URL that cannot be parsed is bad input"


def test_each_warning_and_problem_has_advice(tmp_path, bucket):
    for checks in (found(tmp_path), found(*bucket), found("s3://nothing", {"endpoint_url": "http://127.0.0.1:1"})):
        assert all(check.advice for check in checks.values() if check.status != "ok")


def test_without_a_url_nothing_is_asked_on_a_network(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    assert {check.name for check in examine()} >= {"images", "processors", "memory", "proxies"}


# --- a URL


def test_zarr_of_others_is_said_to_be_so(tmp_path):
    zarr.open_group(tmp_path / "g", mode="w").create_array("a", data=np.arange(3))
    assert "Zarr that others wrote, 1 array:" in found(tmp_path / "g")["dataset"].found


def test_a_bucket_tells_its_endpoint_and_where_the_credentials_are(bucket, moto):
    checks = found(*bucket)
    assert not problems(checks)
    assert (checks["credentials"].found, checks["credentials"].status) == ("storage options", "ok")
    assert checks["endpoint"].found == f"{moto.endpoint}, region us-east-1"
    assert checks["client"].found.startswith("http: S3")
    assert "ms for a request" in checks["connection"].found
    assert checks["clock"].status == "ok" and "s from the server's" in checks["clock"].found
    assert "40 samples" in checks["dataset"].found


class Container(QuietHandler):
    """The service that gives a container its credentials."""

    def do_GET(self):
        keys = {"AccessKeyId": "AKIACONTAINER", "SecretAccessKey": SECRET, "Token": SECRET}
        self.respond(200, json.dumps({**keys, "Expiration": "2099-01-01T00:00:00Z"}).encode())


def environment(monkeypatch, _):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def profile(monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text(f"[mine]\naws_access_key_id=AKIAPROFILE\naws_secret_access_key={SECRET}\n")
    monkeypatch.setenv("AWS_PROFILE", "mine")


def container(monkeypatch, _):
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{Container.endpoint}/container")


def none(_, __):
    pass


SOURCES = {
    environment: "the environment (AWS_ACCESS_KEY_ID)",
    profile: "the credentials file, profile mine",
    container: "the role of the container",
    none: "none found: requests are not signed",
}


@pytest.mark.usefixtures("no_keys")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_the_source_of_credentials_is_named_and_no_key(source, bucket, moto, monkeypatch, tmp_path):
    url, options = bucket
    rest = {"endpoint_url": moto.endpoint, "client_kwargs": options["client_kwargs"]}
    with QuietServer(Container).running() as server:
        Container.endpoint = server.endpoint
        source(monkeypatch, tmp_path)
        checks = found(url, rest)
    assert checks["credentials"].found == SOURCES[source]
    text = json.dumps([check.to_dict() for check in checks.values()])
    assert SECRET not in text and "AKIA" not in text
    if source is none:
        assert "no credentials found" in checks["client"].found
        assert "AWS_ACCESS_KEY_ID" in checks["client"].advice
        assert "anon" in found(url, {**rest, "anon": True})["credentials"].found
    else:
        assert not problems(checks)


@pytest.mark.usefixtures("no_keys")
def test_a_profile_that_is_missing_is_a_problem(bucket, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    (problem,) = problems(found(*bucket)).values()
    assert "nobody" in problem.found


def test_wrong_credentials_and_expired_ones_are_problems_with_the_stores_reason(bucket, seaweedfs):
    wrong = {**seaweedfs.storage_options, "secret": SECRET}
    checks = problems(found(seaweedfs.url("x"), wrong))
    assert "SignatureDoesNotMatch" in checks["dataset"].found
    assert SECRET not in str(checks)
    url, options = bucket
    with FaultProxy(options["endpoint_url"], [Fault("403", method="GET")]) as proxy:
        checks = problems(found(url, {**options, "endpoint_url": proxy.endpoint}))
    assert "the credentials have expired" in checks["dataset"].found
    assert checks["dataset"].advice == "renew them"


class Skewed(QuietHandler):
    """Passes requests on to another server, and states another time."""

    behind, seconds = "", 0.0

    def do_GET(self):
        connection = HTTPConnection(urlsplit(self.behind).netloc, timeout=30)
        connection.request(self.command, self.path, headers=dict(self.headers))
        with connection.getresponse() as response:
            body = response.read()
            kept = {name: value for name, value in response.headers.items() if name in ("ETag", "Content-Range")}
            self.respond(response.status, body, kept)
        connection.close()

    do_HEAD = do_GET

    def date_time_string(self, timestamp=None):
        return super().date_time_string((timestamp or time.time()) + self.seconds)


@pytest.mark.parametrize(("minutes", "status"), [(20, "problem"), (-20, "problem"), (5, "warning"), (0, "ok")])
def test_a_clock_that_differs_is_measured(minutes, status, bucket, monkeypatch):
    url, options = bucket
    monkeypatch.setattr(Skewed, "behind", options["endpoint_url"])
    monkeypatch.setattr(Skewed, "seconds", 60.0 * minutes)
    with QuietServer(Skewed).running() as server:
        checks = found(url, {**options, "endpoint_url": server.endpoint})
    assert checks["clock"].status == status
    assert "40 samples" in checks["dataset"].found
    if minutes:
        seconds = int(checks["clock"].found.split()[0])
        assert abs(seconds - 60 * abs(minutes)) <= 5
        assert ("behind" if minutes > 0 else "ahead of") in checks["clock"].found
        assert "15 minutes" in checks["clock"].advice


def test_an_endpoint_that_cannot_be_reached_is_a_problem(bucket):
    url, options = bucket
    with socket.socket() as closed:  # bound, so that nobody listens there meanwhile
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        (problem,) = problems(found(url, {**options, "endpoint_url": endpoint})).values()
    assert "cannot be reached" in problem.found and "endpoint_url" in problem.advice
    (problem,) = problems(found("https://streamloader-no-such-host.invalid/x")).values()
    assert (problem.name, "cannot be reached" in problem.found) == ("connection", True)


@pytest.mark.long
def test_an_endpoint_that_does_not_respond_is_a_problem_soon(bucket):
    url, options = bucket
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (problem,) = problems(found(url, {**options, "endpoint_url": endpoint})).values()
    assert problem.name == "connection"
    assert time.monotonic() - begin < 30


@pytest.mark.usefixtures("no_keys")
def test_a_certificate_of_ones_own_is_a_problem_until_it_is_trusted(tmp_path, monkeypatch):
    options = {"key": "k", "secret": SECRET, "client_kwargs": {"region_name": "us-east-1"}}
    with QuietServer(Container, tls=certified(tmp_path, ["127.0.0.1"])).running() as server:
        options["endpoint_url"] = server.endpoint
        problem = found("s3://bucket/x", options)["connection"]
        assert (problem.status, "certificate is not trusted" in problem.found) == ("problem", True)
        assert "AWS_CA_BUNDLE" in problem.advice
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        assert "its certificate is trusted" in found("s3://bucket/x", options)["connection"].found


def test_a_bucket_that_may_not_be_listed_is_a_warning(bucket):
    url, options = bucket
    with FaultProxy(options["endpoint_url"], [Fault("403", path="list-type")]) as proxy:
        checks = found(url, {**options, "endpoint_url": proxy.endpoint})
    assert not problems(checks)
    assert checks["listing"].status == "warning" and "training does not need it" in checks["listing"].advice


def test_a_protocol_whose_package_is_missing_names_it():
    if doctor._exists("gcsfs"):
        pytest.skip("gcsfs is installed")
    (problem,) = problems(found("gs://bucket/x")).values()
    assert "gcsfs" in problem.found + problem.advice


SECRETS = [
    f"s3://AKIASECRETKEY:{SECRET}@bucket/x",
    f"http://user:{SECRET}@127.0.0.1:1/x",
    f"http://127.0.0.1:1/x?X-Amz-Signature={SECRET}",
]


@pytest.mark.parametrize("url", SECRETS)
def test_secrets_of_a_url_are_not_shown(url, capsys):
    for arguments in (
        [url],
        [url, "--json"],
        ["s3://bucket/x", f"--storage-option=secret={SECRET}", "--storage-option=key=k"],
    ):
        more = ["--storage-option=endpoint_url=http://127.0.0.1:1"] if arguments[0].startswith("s3") else []
        status, out, err = run(capsys, "doctor", *arguments, *more)
        assert status == 1
        assert SECRET not in out + err and "AKIASECRETKEY" not in out + err


@pytest.mark.parametrize("proxy", [f"user:{SECRET}@127.0.0.1:1", f"http://user:{SECRET}@127.0.0.1:1"])
def test_passwords_of_proxies_are_not_shown(proxy, bucket, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    shown = [each.found + each.advice for each in examine(*bucket)]
    assert any("127.0.0.1:1" in text for text in shown)
    assert not [text for text in shown if SECRET in text]


RETURNED = ["no json", "[1]", json.dumps({"Version": 1, "AccessKeyId": "k", "Expiration": SECRET}), ""]


@pytest.mark.parametrize("text", RETURNED)
def test_a_source_of_credentials_that_returns_anything_else_is_a_problem(text, bucket, monkeypatch, tmp_path):
    (tmp_path / "out").write_text(text)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {tmp_path / 'out'}\n")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    (problem,) = problems(found(bucket[0], {"endpoint_url": bucket[1]["endpoint_url"]})).values()
    assert "credentials" in problem.found
    assert SECRET not in problem.found


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["s3://bucket/x", "endpoint_ur=http://h"], "endpoint_url"),
        (["s3://bucket/x", "endpoint_url=http://[::1"], "Invalid IPv6 URL"),
        (["s3://bucket/x", "endpoint_url=http://127.0.0.1:99999"], "Port out of range"),
        (["s3://bucket/x", "endpoint_url=http://a..b"], "Invalid endpoint"),
        (["http://127.0.0.1:99999/x"], "Port out of range"),
        (["http://[::1/x"], "Invalid IPv6 URL"),
        (["http://a..b/x"], "label"),
    ],
)
def test_options_and_addresses_that_cannot_be_are_errors(arguments, shown, capsys):
    url, *options = arguments
    status, _, err = run(capsys, "doctor", url, *(f"--storage-option={each}" for each in options))
    assert status == 2
    assert shown in err


# --- the machine


def test_the_quota_of_both_versions_of_control_groups_is_read(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    (two / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(two) == 1.5
    (two / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(two) is None
    for name in ("cpu", "cpu,cpuacct"):
        (one / name).mkdir(parents=True)
        (one / name / "cpu.cfs_quota_us").write_text("200000\n")
        (one / name / "cpu.cfs_period_us").write_text("100000\n")
        assert cpu_quota(one) == 2.0
        (one / name / "cpu.cfs_quota_us").write_text("-1\n")
        assert cpu_quota(one) is None
        shutil.rmtree(one)
    assert cpu_quota(tmp_path / "none") is None


def test_free_memory_is_that_of_the_machine_or_of_the_control_group(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert memory_available(tmp_path / "meminfo", tmp_path) == 50 << 10
    (tmp_path / "memory.max").write_text("40960")
    (tmp_path / "memory.current").write_text("30000")
    assert memory_available(tmp_path / "meminfo", tmp_path) == 10960
    assert memory_available(tmp_path / "none", tmp_path / "none") is None
    assert doctor._check_memory(1 << 30, 1 << 20).status == "warning"


def test_a_clock_is_compared_with_the_date_less_the_age():
    date = {"Date": "Fri, 20 Nov 2026 12:00:00 GMT"}
    noon = 1795176000.0
    assert clock_skew(date, noon) == 0
    assert clock_skew(date, noon + 90) == 90
    assert clock_skew({**date, "Age": "60"}, noon + 90) == 30
    assert clock_skew({}, noon) is clock_skew({"Date": "yesterday"}, noon) is None


def test_threads_of_openmp_are_counted_for_all_ranks(monkeypatch):
    def check(**env):
        monkeypatch.setattr(os, "environ", {**os.environ, **env})
        (one,) = [each for each in doctor.check_environment(os.environ) if each.name == "OpenMP threads"]
        return one.status

    assert check(OMP_NUM_THREADS="1") == "ok"
    assert check(OMP_NUM_THREADS="100000") == "warning"
    assert check(OMP_NUM_THREADS="", LOCAL_WORLD_SIZE="4") == "warning"
    assert check(OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE="4") == "ok"


def test_a_package_that_cannot_be_imported_is_a_problem_and_a_missing_one_names_its_feature(tmp_path):
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')\n")
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['simplejpeg'] = None\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent), *sys.path])
    command = [*COMMAND, "doctor", "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert "libGL.so.1" in checks["opencv-python-headless"]["found"]
    assert checks["opencv-python-headless"]["advice"].startswith("pip install --force-reinstall")
    assert checks["images"]["status"] == "warning"
    assert "pip install simplejpeg opencv-python-headless" in checks["images"]["advice"]


def test_torch_is_not_imported(data):
    code = "import sys\nfrom streamloader.measure import doctor\ndoctor.examine(sys.argv[1])\n"
    command = [sys.executable, "-c", f"{code}print('torch' in sys.modules)", data]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_check_is_a_frozen_value():
    with pytest.raises(AttributeError):
        Check("a", "ok", "b").found = MASK
