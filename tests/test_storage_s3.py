"""S3 as botocore's own client speaks it: URLs, headers and signatures equal, and a bucket's region is found."""

import base64
import datetime
import io
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import boto3
import botocore.auth
import botocore.loaders
import botocore.session
import crc32c
import moto as moto_package
import numpy as np
import pytest
from aws import standing_in_for_aws
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials
from datasets import within
from faulty import NO_RETRY, QuietHandler, serving
from servers import STORE_CALLS

import streamloader as sl
from streamloader.errors import EndpointError, NotFoundError
from streamloader.storage import open_store
from streamloader.storage.s3 import SIGNATURE_SECONDS, S3Client
from streamloader.storage.url import parse_location
from streamloader.testing import Fault, FaultProxy

NOW = datetime.datetime(2026, 11, 23, 1, 2, 3, tzinfo=datetime.UTC)
KEY = "folder/ü x+y=z~(1)/shard-0.bin"
BODY = b"0123456789"
LOADER = botocore.loaders.create_loader()
KEYS = {"key": "AKIDEXAMPLE", "secret": "not/a+secret"}
POINT = "arn:aws:s3:us-west-2:123456789012:accesspoint/my-point"
LAMBDA = "arn:aws:s3-object-lambda:us-west-2:123456789012:accesspoint/my-lambda"
OUTPOST = "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-01234567890123456/accesspoint/my-point"
ALIAS = "my-point-abcdefghijklmnopqrstuvwxyz01-s3alias"
EXPRESS = "photos--use1-az4--x-s3"


def region(name, **s3):
    return {"client_kwargs": {"region_name": name}, **({"config_kwargs": {"s3": s3}} if s3 else {})}


def config(**values):
    return {"client_kwargs": {"region_name": "eu-west-1"}, "config_kwargs": values}


def endpoint(url, **s3):
    return {"endpoint_url": url, **({"config_kwargs": {"s3": s3}} if s3 else {})}


TWO_ENDPOINTS = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ENDPOINT_URL_S3": "https://store.example:9000"}
AES = {"SSECustomerAlgorithm": "AES256"}
# bucket, options of s3fs, environment
CASES = {
    "no region": ("photos", {}, {}),
    "eu-west-1": ("photos", region("eu-west-1"), {}),
    "china": ("photos", region("cn-north-1"), {}),
    "region in config": ("photos", {"config_kwargs": {"region_name": "eu-central-1"}}, {}),
    "region in environment": ("photos", {}, {"AWS_DEFAULT_REGION": "eu-north-1"}),
    "path": ("photos", region("eu-west-1", addressing_style="path"), {}),
    "virtual": ("photos", region("eu-west-1", addressing_style="virtual"), {}),
    "dotted": ("my.photos", region("eu-west-1"), {}),
    "upper case": ("Photos_old", region("us-east-1"), {}),
    "dual-stack": ("photos", region("eu-west-1", use_dualstack_endpoint=True), {}),
    "FIPS": ("photos", region("us-east-2") | {"config_kwargs": {"use_fips_endpoint": True}}, {}),
    "accelerate": ("photos", region("eu-west-1", use_accelerate_endpoint=True), {}),
    "access point": (POINT, region("us-west-2"), {}),
    "access point without region": (POINT, {}, {}),
    "access point alias": (ALIAS, region("us-west-2"), {}),
    "object lambda": (LAMBDA, region("us-west-2"), {}),
    "outpost": (OUTPOST, region("us-west-2"), {}),
    "express": (EXPRESS, region("us-east-1"), {}),
    "express without sessions": (EXPRESS, region("us-east-1"), {"AWS_S3_DISABLE_EXPRESS_SESSION_AUTH": "true"}),
    "http endpoint": ("photos", endpoint("http://store.example:9000"), {}),
    "https endpoint": ("photos", endpoint("https://store.example"), {}),
    "endpoint with path": ("photos", endpoint("https://store.example:8443/s3/v1"), {}),
    "IPv6 endpoint": ("photos", endpoint("http://[::1]:9000"), {}),
    "virtual at an endpoint": ("photos", endpoint("https://store.example", addressing_style="virtual"), {}),
    "endpoint in client_kwargs": ("photos", {"client_kwargs": {"endpoint_url": "http://127.0.0.1:9000"}}, {}),
    "AWS endpoint given": ("photos", endpoint("https://s3.eu-west-3.amazonaws.com"), {}),
    "AWS_ENDPOINT_URL": ("photos", {}, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}),
    "AWS_ENDPOINT_URL_S3": ("photos", {}, TWO_ENDPOINTS),
    "without TLS": ("photos", {**region("eu-west-1"), "use_ssl": False}, {}),
    "profile": ("photos", {"profile": "ours"}, {}),
    "AWS_PROFILE": ("photos", {}, {"AWS_PROFILE": "ours"}),
    "anonymous": ("photos", {"anon": True}, {}),
    "anonymous in config": ("photos", config(signature_version=botocore.UNSIGNED), {}),
    "session token": ("photos", {**KEYS, "token": "t" * 100, **region("eu-west-1")}, {}),
    "keys in environment": ("photos", {}, {"AWS_ACCESS_KEY_ID": "AKIDENV", "AWS_SECRET_ACCESS_KEY": "env"}),
    "requester pays": ("photos", {"requester_pays": True}, {}),
    "checksums when required": ("photos", config(request_checksum_calculation="when_required"), {}),
    "no checksums of responses": ("photos", config(response_checksum_validation="when_required"), {}),
    "signed payloads": ("photos", region("eu-west-1", payload_signing_enabled=True), {}),
    "unsigned payloads": ("photos", region("eu-west-1", payload_signing_enabled=False), {}),
    "customer key": ("photos", {"s3_additional_kwargs": {"SSECustomerKey": "k" * 32, **AES}}, {}),
    "storage class": ("photos", {"s3_additional_kwargs": {"StorageClass": "GLACIER_IR"}}, {}),
}


@pytest.fixture(autouse=True)
def profile(no_keys, tmp_path):
    (tmp_path / "config").write_text(
        "[profile ours]\nregion = sa-east-1\naws_access_key_id = AKIDPROFILE\naws_secret_access_key = secret\n"
        "s3 =\n  addressing_style = path\n"
    )


@pytest.fixture(autouse=True)
def one_loader(monkeypatch):
    """Let all sessions share what botocore reads of its own files, which takes most of a client's time."""
    monkeypatch.setattr(botocore.session, "create_loader", lambda *_: LOADER)


# the response to CreateSession
EXPRESS_SESSION = (
    b"<CreateSessionResult><Credentials><AccessKeyId>AKIDSESSION</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"
    b"<SessionToken>session-token</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>"
    b"</CreateSessionResult>"
)


class Raw(io.BytesIO):
    """A body as botocore reads it."""

    def stream(self, **_):
        yield self.read()


def respond(sent, request, **_):
    """Append a request of a client to `sent`, and respond without sending it."""
    if "session" in (urlsplit(request.url).query or ""):
        return AWSResponse(request.url, 200, {}, Raw(EXPRESS_SESSION))
    sent.append(request)
    return AWSResponse(request.url, 200, {"content-length": "0"}, Raw(b""))


def own_client(options, hashed=True, checksums=""):
    """The client that s3fs would make of its options; `hashed`: bodies; `checksums`: when it makes some of its own."""
    session = botocore.session.Session(profile=options.get("profile"))
    settings = dict(options.get("config_kwargs") or {})
    if checksums:
        settings["request_checksum_calculation"] = checksums
    if not hashed:
        s3 = settings.get("s3") or (session.get_scoped_config().get("s3") if session.profile else None) or {}
        settings["s3"] = {"payload_signing_enabled": False, **s3}
    if options.get("anon"):
        settings["signature_version"] = botocore.UNSIGNED
    given = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "aws_session_token": "token"}
    keys = {name: options[ours] for name, ours in given.items() if ours in options}
    more = {name: options[name] for name in ("endpoint_url", "use_ssl") if name in options}
    return session.create_client(
        "s3", config=Config(**settings), **keys, **more, **(options.get("client_kwargs") or {})
    )


def facts(request):
    """Return what is compared of a request: all that is signed, not who asks and how the body is transported."""
    kept = {
        name.lower(): value.decode() if isinstance(value, bytes) else str(value)
        for name, value in request.headers.items()
        if not name.lower().startswith(("user-agent", "amz-sdk-", "content-length", "expect"))
    }
    return request.url, kept


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES)
def test_requests_equal_those_of_botocores_own_client(case, monkeypatch):
    bucket, options, env = CASES[case]
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: NOW.replace(tzinfo=None))
    monkeypatch.setattr("streamloader.storage.s3.time", SimpleNamespace(monotonic=lambda: 0.0))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if not ({"anon", "profile"} & options.keys() or {"AWS_PROFILE", "AWS_ACCESS_KEY_ID"} & env.keys()):
        options = {**KEYS, **options}
    sent = []
    monkeypatch.setattr("streamloader.storage.s3._send", lambda _, request: respond(sent, request))
    ours = S3Client(parse_location(f"s3://{bucket}/folder", options))
    crc = base64.b64encode(crc32c.crc32c(BODY).to_bytes(4, "big")).decode()
    put = {"Body": BODY, **(options.get("s3_additional_kwargs") or {})}
    payer = {"RequestPayer": "requester"} if options.get("requester_pays") else {}
    get = {name: value for name, value in put.items() if name.startswith("SSEC")}

    def requested(call):
        sent.clear()
        call()
        return facts(sent[0])

    def theirs(operation, client, **parameters):
        client.meta.events.register("before-send.s3", partial(respond, sent))
        return requested(lambda: getattr(client, operation)(Bucket=bucket, Key=KEY, **parameters, **payer))

    signed = ours.sign(KEY)
    own = own_client(options)
    assert facts(signed) == theirs("get_object", own, **get)
    if case != "express":  # whose sessions are too short to reuse a signature
        assert ours.sign(KEY) is signed
    assert requested(lambda: ours.info(KEY)) == theirs("head_object", own, **get)
    expected = theirs("put_object", own_client(options, hashed=False), ChecksumCRC32C=crc, **put)
    assert requested(lambda: ours.put(KEY, BODY)) == expected
    ours._checks_crc = False
    expected = theirs("put_object", own_client(options, checksums="when_required"), **put)
    assert requested(lambda: ours.put(KEY, [BODY[:3], BODY[3:]])) == expected


@pytest.mark.long
def test_a_further_client_takes_little_memory(monkeypatch):
    monkeypatch.undo()  # of one_loader
    first = S3Client(parse_location("s3://bucket", KEYS))
    with within(4 << 20):
        assert S3Client(parse_location("s3://other", KEYS)).keys() == first.keys()


def test_a_signature_serves_one_object_for_a_minute_and_no_longer_than_its_keys(monkeypatch):
    now, token = [0.0], ["t1"]
    monkeypatch.setattr("streamloader.storage.s3.time.monotonic", lambda: now[0])
    s3 = S3Client(parse_location("s3://bucket", {**KEYS, "token": "t"}))
    frozen = lambda: ReadOnlyCredentials("key", "secret", token[0])  # noqa: E731
    monkeypatch.setattr(s3.template().signer, "_credentials", SimpleNamespace(get_frozen_credentials=frozen))
    first = s3.sign("a")
    assert first.headers["X-Amz-Security-Token"] == "t1"
    assert "range" not in first.headers["Authorization"].lower()
    now[0] = SIGNATURE_SECONDS - 1
    assert s3.sign("a") is first
    assert s3.sign("b").headers["Authorization"] != first.headers["Authorization"]
    token[0] = "t2"
    second = s3.sign("a")
    assert second.headers["X-Amz-Security-Token"] == "t2"
    now[0] += SIGNATURE_SECONDS
    assert s3.sign("a") is not second


HOME = "eu-central-1"
# how far the configuration is from the truth, and what it is
WRONG = {
    "no region": ({}, ""),
    "a wrong region": ({"client_kwargs": {"region_name": "us-west-2"}}, ""),
    "a wrong default region": ({}, "eu-west-1"),
}


@pytest.fixture(scope="module")
def bucket(moto):
    return moto.new_bucket()


@pytest.fixture
def aws(moto, bucket, tmp_path):
    with standing_in_for_aws(moto.endpoint, {bucket: HOME}, tmp_path) as server:
        yield server


@pytest.mark.long
@pytest.mark.parametrize("style", ["virtual", "path"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_conversion_and_an_epoch_find_the_buckets_region(aws, bucket, style, wrong, monkeypatch):
    given, default = WRONG[wrong]
    if default:
        monkeypatch.setenv("AWS_DEFAULT_REGION", default)
    options = {**KEYS, **given, "config_kwargs": {"s3": {"addressing_style": style}}}
    url = f"s3://{bucket}/{uuid.uuid4().hex}"
    rows = [{"x": np.full(100, i, np.float32)} for i in range(64)]
    sl.convert(rows, url, workers=0, storage_options=options)
    written = len(aws.requests)
    dataset = sl.StreamingDataset(url, batch_size=16, storage_options=options)
    assert sorted(int(x) for batch in dataset for x in batch["x"][:, 0]) == list(range(64))
    assert dataset.stats().client.startswith("http:")
    redirected = [status for _, _, status in aws.requests if status in (301, 400)]
    assert 0 < len(redirected) <= 12, aws.requests
    reads = [(host, status) for host, method, status in aws.requests[written:] if method == "GET"]
    virtual = f"{bucket}." if style == "virtual" else ""
    assert reads[-1][0] == f"{virtual}s3.{HOME}.amazonaws.com"
    assert reads[-1][1] == 206


@pytest.mark.long
@pytest.mark.parametrize(("style", "wrong"), [("virtual", "no region"), ("path", "a wrong region")])
def test_every_call_of_a_store_finds_the_buckets_region(aws, bucket, style, wrong):
    options = {**KEYS, "retry": NO_RETRY, **WRONG[wrong][0], "config_kwargs": {"s3": {"addressing_style": style}}}
    place = f"s3://{bucket}/{uuid.uuid4().hex}"
    for call in STORE_CALLS.values():
        assert call(open_store(place, options)) != b""  # each with clients of its own
    assert aws.requests[-1][2] == 200


@pytest.mark.long
def test_the_region_is_learnt_once_for_all_threads(aws, bucket, monkeypatch):
    monkeypatch.setattr("streamloader.storage.retry.LEAST_PATIENCE", 60.0)  # on a busy machine no request is repeated
    store = open_store(f"s3://{bucket}/{uuid.uuid4().hex}", {**KEYS, "retry": NO_RETRY})
    store.put("a", BODY)
    reader = open_store(store.url, {**KEYS, "retry": NO_RETRY}).reader()
    aws.requests.clear()
    with ThreadPoolExecutor(8) as threads:
        assert {bytes(data) for data in threads.map(lambda _: reader.read("a", 2, 5), range(64))} == {BODY[2:5]}
    assert sum(status == 206 for _, _, status in aws.requests) <= 65  # botocore's client asked once
    assert sum(status != 206 for _, _, status in aws.requests) <= 9


@pytest.mark.parametrize(("status", "code"), [(301, "PermanentRedirect"), (307, "")])
def test_a_redirect_without_a_region_is_an_error_after_a_few_requests(status, code):
    class Redirecting(QuietHandler):
        def do_GET(self):
            requests.append(self.path)
            self.respond(status, f"<Error><Code>{code}</Code></Error>".encode() if code else b"")

        do_HEAD = do_GET

    requests = []
    with serving(Redirecting) as server:
        store = open_store("s3://bucket", {**KEYS, "endpoint_url": server.endpoint, "retry": NO_RETRY})
        for name in ("read", "head", "list"):
            requests.clear()
            with pytest.raises(EndpointError, match="another region or at another endpoint"):
                STORE_CALLS[name](store)
            assert len(requests) <= (3 if status == 307 else 9)


@pytest.mark.parametrize("name", ["get", "read", "head", "list"])
def test_one_redirect_to_another_host_is_followed_as_botocore_does(name, moto, bucket):
    """It asks for the region of the bucket, and repeats the request there; keys are sent to no other host."""
    with serving(QuietHandler) as other, FaultProxy(moto.endpoint) as proxy:
        store = open_store(
            f"s3://{bucket}", {**moto.storage_options, "endpoint_url": proxy.endpoint, "retry": NO_RETRY}
        )
        store.put("a", BODY)
        proxy.faults = [Fault("307", times=1, location=other.endpoint)]
        STORE_CALLS[name](store)
        assert proxy.counts["307"] == 1
        assert not other.connections


def test_one_redirect_between_gets_with_data_is_no_change_of_the_region(moto):
    with FaultProxy(moto.endpoint) as proxy:
        store = open_store(moto.url(), {**moto.storage_options, "endpoint_url": proxy.endpoint, "retry": NO_RETRY})
        store.put("a", BODY)
        assert store.get_range("a", 0, 9) == BODY[:9]
        for kind in ("301", "307"):
            before, proxy.faults = proxy.counts, [Fault(kind, times=1)]
            assert store.get_range("a", 1, 9) == BODY[1:9]
            assert proxy.counts - before == {kind: 1, "requests": 2}


def test_a_request_that_may_be_repeated_is_not_taken_for_one_that_the_server_rejects():
    """A 400 by `RequestTimeout` says nothing about checksums, and nothing about how objects are deleted."""

    class Timing(QuietHandler):
        def do_PUT(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.command, "x-amz-checksum-crc32c" in self.headers))
            if len(requests) == 1:
                self.respond(400, b"<Error><Code>RequestTimeout</Code></Error>")
            else:
                self.respond(200, b"<DeleteResult></DeleteResult>", {"ETag": '"1"'})

        do_POST = do_PUT

        def do_DELETE(self):
            pytest.fail("the objects are deleted one by one")

    requests = []
    with serving(Timing) as server:
        options = {**KEYS, "endpoint_url": server.endpoint, "retry": {"base_seconds": 0.01}}
        open_store("s3://bucket", options).put("a", BODY)
        assert requests[:2] == [("PUT", True)] * 2
        requests.clear()
        open_store("s3://bucket", options).delete(["a", "b"])
        assert [command for command, _ in requests] == ["POST"] * 2


def test_no_request_passes_a_stub_of_botocore(monkeypatch):
    """moto's in-process mock is one: the names of AWS are never resolved."""
    monkeypatch.undo()  # of one_loader
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("a connection was opened"))
    with moto_package.mock_aws():
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="mocked")
        store = open_store("s3://mocked/folder", {"retry": NO_RETRY})
        for ask in STORE_CALLS.values():
            ask(store)
        body = bytes(range(256)) * (3 << 12)  # of several pieces
        store.put("large", [body[:100], body[100:]])
        assert bytes(store.read("large", 5, 1 << 21)) == body[5 : 1 << 21]
        assert store.get("large") == body
        with pytest.raises(NotFoundError):
            store.get("nothing")


def test_a_replacement_reads_again_what_was_cut_short(moto):
    """Half of the object is not another object, which would count as written by somebody else."""
    url = moto.url()
    with FaultProxy(moto.endpoint, [Fault("truncate", method="GET", first=1)]) as proxy:
        store = open_store(
            url, {**moto.storage_options, "endpoint_url": proxy.endpoint, "retry": {"base_seconds": 0.01}}
        )
        store.put("a", BODY)
        store.replace("a", BODY + b"more", BODY)
        assert proxy.counts["truncate"] == 1
        assert store.get("a") == BODY + b"more"
