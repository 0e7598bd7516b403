"""S3 as botocore's own client speaks it: URLs, headers and signatures equal, and a bucket's region is found."""

from __future__ import annotations

import contextlib
import datetime
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.auth
import botocore.loaders
import botocore.session
import numpy as np
import pytest
from aws import Aws, standing_in_for_aws
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials
from servers import S3Server

import streamloader as sl
from streamloader.errors import EndpointError
from streamloader.storage import NO_RETRY, Store, open_store
from streamloader.storage.http_writer import checksum
from streamloader.storage.location import parse_location
from streamloader.storage.s3 import CHECKSUM, SIGNATURE_SECONDS, open_s3

NOW = datetime.datetime(2026, 11, 23, 1, 2, 3, tzinfo=datetime.UTC)
KEY = "folder/ü x+y=z~(1)/shard-0.bin"
BODY = b"0123456789"
LOADER = botocore.loaders.create_loader()
KEYS = {"key": "AKIDEXAMPLE", "secret": "not/a+secret"}
POINT = "arn:aws:s3:us-west-2:123456789012:accesspoint/my-point"
GOV_POINT = "arn:aws-us-gov:s3:us-gov-west-1:123456789012:accesspoint/my-point"
LAMBDA = "arn:aws:s3-object-lambda:us-west-2:123456789012:accesspoint/my-lambda"
OUTPOST = "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-01234567890123456/accesspoint/my-point"
ALIAS = "my-point-abcdefghijklmnopqrstuvwxyz01-s3alias"
EXPRESS = "photos--use1-az4--x-s3"


def region(name: str, **s3: Any) -> dict[str, Any]:
    return {"client_kwargs": {"region_name": name}, **({"config_kwargs": {"s3": s3}} if s3 else {})}


def config(**values: Any) -> dict[str, Any]:
    return {"client_kwargs": {"region_name": "eu-west-1"}, "config_kwargs": values}


def endpoint(url: str, **s3: Any) -> dict[str, Any]:
    return {"endpoint_url": url, **({"config_kwargs": {"s3": s3}} if s3 else {})}


# bucket, options of s3fs, environment
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "no region": ("photos", {}, {}),
    "us-east-1": ("photos", region("us-east-1"), {}),
    "regional us-east-1": ("photos", region("us-east-1", us_east_1_regional_endpoint="regional"), {}),
    "eu-west-1": ("photos", region("eu-west-1"), {}),
    "ap-southeast-5": ("photos", region("ap-southeast-5"), {}),
    "us-gov": ("photos", region("us-gov-west-1"), {}),
    "china": ("photos", region("cn-north-1"), {}),
    "china dual-stack": ("photos", region("cn-north-1", use_dualstack_endpoint=True), {}),
    "region in config": ("photos", {"config_kwargs": {"region_name": "eu-central-1"}}, {}),
    "region in environment": ("photos", {}, {"AWS_DEFAULT_REGION": "eu-north-1"}),
    "path": ("photos", region("eu-west-1", addressing_style="path"), {}),
    "virtual": ("photos", region("eu-west-1", addressing_style="virtual"), {}),
    "auto": ("photos", region("eu-west-1", addressing_style="auto"), {}),
    "path without region": ("photos", {"config_kwargs": {"s3": {"addressing_style": "path"}}}, {}),
    "dotted": ("my.photos", region("eu-west-1"), {}),
    "dotted virtual": ("my.photos", region("eu-west-1", addressing_style="virtual"), {}),
    "upper case": ("Photos_old", region("us-east-1"), {}),
    "dual-stack": ("photos", region("eu-west-1", use_dualstack_endpoint=True), {}),
    "dual-stack in environment": ("photos", region("eu-west-1"), {"AWS_USE_DUALSTACK_ENDPOINT": "true"}),
    "FIPS": (
        "photos",
        {"client_kwargs": {"region_name": "us-east-2"}, "config_kwargs": {"use_fips_endpoint": True}},
        {},
    ),
    "FIPS dual-stack": ("photos", config(use_fips_endpoint=True, use_dualstack_endpoint=True), {}),
    "FIPS us-gov": ("photos", region("us-gov-east-1"), {"AWS_USE_FIPS_ENDPOINT": "true"}),
    "accelerate": ("photos", region("eu-west-1", use_accelerate_endpoint=True), {}),
    "accelerate dual-stack": (
        "photos",
        region("eu-west-1", use_accelerate_endpoint=True, use_dualstack_endpoint=True),
        {},
    ),
    "access point": (POINT, region("us-west-2"), {}),
    "access point elsewhere": (POINT, region("eu-west-1"), {}),
    "access point without region": (POINT, {}, {}),
    "access point dual-stack": (POINT, region("us-west-2", use_dualstack_endpoint=True), {}),
    "access point us-gov": (GOV_POINT, region("us-gov-west-1"), {}),
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
    "AWS_ENDPOINT_URL_S3": (
        "photos",
        {},
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ENDPOINT_URL_S3": "https://store.example:9000"},
    ),
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
    "customer key": (
        "photos",
        {"s3_additional_kwargs": {"SSECustomerKey": "k" * 32, "SSECustomerAlgorithm": "AES256"}},
        {},
    ),
    "storage class": ("photos", {"s3_additional_kwargs": {"StorageClass": "GLACIER_IR"}}, {}),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "DEFAULT_REGION", "CA_BUNDLE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    (tmp_path / "config").write_text(
        "[profile ours]\nregion = sa-east-1\naws_access_key_id = AKIDPROFILE\naws_secret_access_key = secret\n"
        "s3 =\n  addressing_style = path\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


@pytest.fixture(autouse=True)
def one_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all sessions share what botocore reads of its own files, which takes most of a client's time."""
    monkeypatch.setattr(botocore.session, "create_loader", lambda *_: LOADER)


@pytest.fixture
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: NOW.replace(tzinfo=None))


class Express:
    """The answer to CreateSession."""

    XML = (
        b"<CreateSessionResult><Credentials><AccessKeyId>AKIDSESSION</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"
        b"<SessionToken>session-token</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>"
        b"</CreateSessionResult>"
    )


class Raw:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.data

    def read(self, *_: Any) -> bytes:
        data, self.data = self.data, b""
        return data


def captured(client: Any) -> list[Any]:
    """Answer the client's requests without sending them, and return the list that they go to."""
    sent: list[Any] = []

    def answer(request: Any, **_: Any) -> AWSResponse:
        if "session" in (urlsplit(request.url).query or ""):
            return AWSResponse(request.url, 200, {}, Raw(Express.XML))
        sent.append(request)
        return AWSResponse(request.url, 200, {"content-length": "0"}, Raw(b""))

    client.meta.events.register("before-send.s3", answer)
    return sent


def own_client(options: dict[str, Any], hashed: bool = True, checksums: str = "") -> Any:
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


def facts(url: str, headers: Any) -> tuple[str, dict[str, str]]:
    """Return what is compared of a request: all that is signed, not who asks and how the body is transported."""
    kept = {
        name.lower(): value.decode() if isinstance(value, bytes) else str(value)
        for name, value in headers.items()
        if not name.lower().startswith(("user-agent", "amz-sdk-", "content-length", "expect"))
    }
    return url, kept


def asked_of(client: Any, operation: str, bucket: str, **parameters: Any) -> tuple[str, dict[str, str]]:
    """Return what the client would send."""
    sent = captured(client)
    getattr(client, botocore.xform_name(operation))(Bucket=bucket, Key=KEY, **parameters)
    return facts(sent[0].url, sent[0].headers)


@pytest.mark.usefixtures("frozen_clock")
@pytest.mark.parametrize("case", CASES)
def test_requests_equal_those_of_botocores_own_client(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, options, env = CASES[case]
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if not ({"anon", "profile"} & options.keys() or {"AWS_PROFILE", "AWS_ACCESS_KEY_ID"} & env.keys()):
        options = {**KEYS, **options}
    ours = open_s3(parse_location(f"s3://{bucket}/folder", options))
    captured(ours._client)
    crc = checksum([memoryview(BODY)])
    put = {"Body": BODY, **(options.get("s3_additional_kwargs") or {})}
    payer = {"RequestPayer": "requester"} if options.get("requester_pays") else {}
    get = {name: value for name, value in put.items() if name.startswith("SSEC")}

    def theirs(operation: str, client: Any, **parameters: Any) -> tuple[str, dict[str, str]]:
        return asked_of(client, operation, bucket, **parameters, **payer)

    client = own_client(options)
    for operation in ("GetObject", "HeadObject"):
        request = ours.request(operation, KEY, {"Range": "bytes=5-9"})
        expected = theirs(operation, client, Range="bytes=5-9", **get)
        assert facts(request.url, request.headers) == expected, operation
    whole = ours.get(KEY)
    assert facts(whole.url, whole.headers) == theirs("GetObject", client, **get)
    if case != "express":  # whose sessions are too short to reuse a signature
        assert ours.get(KEY, {"Range": "bytes=5-9"}).headers == {**whole.headers, "Range": "bytes=5-9"}
    request = ours.request("PutObject", KEY, {CHECKSUM: crc}, [memoryview(BODY)], hashed=False)
    expected = theirs("PutObject", own_client(options, hashed=False), ChecksumCRC32C=crc, **put)
    assert facts(request.url, request.headers) == expected
    request = ours.request("PutObject", KEY, None, [memoryview(BODY[:3]), memoryview(BODY[3:])])
    expected = theirs("PutObject", own_client(options, checksums="when_required"), **put)
    assert facts(request.url, request.headers) == expected


def test_a_signature_serves_one_object_for_a_minute_and_no_longer_than_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, token = [0.0], ["t1"]
    monkeypatch.setattr("streamloader.storage.s3.time.monotonic", lambda: now[0])
    s3 = open_s3(parse_location("s3://bucket", {**KEYS, "token": "t"}))
    monkeypatch.setattr(s3.template("GetObject").signer, "_credentials", RenewedCredentials(token))
    signed: list[str] = []
    request = s3.request
    monkeypatch.setattr(s3, "request", lambda operation, key: signed.append(key) or request(operation, key))
    first = s3.get("a", {"Range": "bytes=0-1"}).headers
    assert first["X-Amz-Security-Token"] == "t1"
    assert "range" not in first["Authorization"].lower()
    now[0] = SIGNATURE_SECONDS - 1
    assert s3.get("a", {"Range": "bytes=0-1"}).headers == first
    assert s3.get("b").headers["Authorization"] != first["Authorization"]
    token[0] = "t2"
    assert s3.get("a").headers["X-Amz-Security-Token"] == "t2"
    now[0] += SIGNATURE_SECONDS
    s3.get("a")
    assert signed == ["a", "b", "a", "a"]


class RenewedCredentials:
    def __init__(self, token: list[str]) -> None:
        self._token = token

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        return ReadOnlyCredentials("key", "secret", self._token[0])


HOME = "eu-central-1"
BUCKET = "streamloader-at-aws"
# how far the configuration is from the truth, and what it is
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no region": ({}, ""),
    "a wrong region": ({"client_kwargs": {"region_name": "us-west-2"}}, ""),
    "a wrong default region": ({}, "eu-west-1"),
}


@pytest.fixture(scope="module")
def bucket(moto: S3Server) -> str:
    with contextlib.closing(moto.client()) as client:
        client.create_bucket(Bucket=BUCKET)
    return BUCKET


@pytest.fixture
def aws(moto: S3Server, bucket: str, tmp_path: Path) -> Iterator[Aws]:
    with standing_in_for_aws(moto.endpoint, {bucket: HOME}, tmp_path) as server:
        yield server


@pytest.mark.parametrize("style", ["virtual", "path"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_conversion_and_an_epoch_find_the_buckets_region(
    aws: Aws, bucket: str, style: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    refused = [status for _, _, status in aws.requests if status in (301, 400)]
    assert 0 < len(refused) <= 12, aws.requests
    reads = [(host, status) for host, method, status in aws.requests[written:] if method == "GET"]
    virtual = f"{bucket}." if style == "virtual" else ""
    assert reads[-1][0] == f"{virtual}s3.{HOME}.amazonaws.com"
    assert reads[-1][1] == 206


@pytest.mark.parametrize(("style", "wrong"), [("virtual", "no region"), ("path", "a wrong region")])
def test_every_call_of_a_store_finds_the_buckets_region(aws: Aws, bucket: str, style: str, wrong: str) -> None:
    options = {**KEYS, **WRONG[wrong][0], "config_kwargs": {"s3": {"addressing_style": style}}}
    place = f"s3://{bucket}/{uuid.uuid4().hex}"
    calls: list[Callable[[Store], Any]] = [
        lambda store: store.put("a", b"abc"),
        lambda store: store.create("b", b"abc"),
        lambda store: store.head("a"),
        lambda store: store.get("a"),
        lambda store: store.get_tail("a", 2),
        lambda store: store.reader().read("a", 1, 2),
        lambda store: list(store.list()),
        lambda store: store.replace("a", b"xyz", b"abc"),
        lambda store: store.remove_leftovers(),
        lambda store: store.delete(["a", "b"]),
    ]
    for call in calls:
        assert call(open_store(place, options, NO_RETRY)) != b""  # each with clients of its own
    assert aws.requests[-1][2] == 200


def test_the_region_is_learnt_once_for_all_threads(aws: Aws, bucket: str) -> None:
    store = open_store(f"s3://{bucket}/{uuid.uuid4().hex}", KEYS, NO_RETRY)
    store.put("a", BODY)
    reader = open_store(store.url, KEYS, NO_RETRY).reader()
    aws.requests.clear()
    with ThreadPoolExecutor(8) as threads:
        assert {bytes(data) for data in threads.map(lambda _: reader.read("a", 2, 5), range(64))} == {BODY[2:5]}
    assert sum(status == 206 for _, _, status in aws.requests) <= 65  # botocore's client asked once
    assert sum(status != 206 for _, _, status in aws.requests) <= 9


def test_a_region_that_is_not_found_out_ends_with_what_to_do() -> None:
    error = b"<Error><Code>PermanentRedirect</Code><Message>elsewhere</Message></Error>"
    with answering(301, error) as url:
        store = open_store("s3://bucket", {**KEYS, "endpoint_url": url}, NO_RETRY)
        for call in (lambda: store.reader().read("a", 0, 1), lambda: store.head("a"), lambda: list(store.list())):
            with pytest.raises(EndpointError, match="another region"):
                call()


@contextlib.contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """Run a server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
