"""No secret that was given in a URL, an option or a variable is found in what is printed, logged or written."""

import contextlib
import json
import logging
import traceback
import uuid
from base64 import b64encode
from urllib.parse import quote

import pytest
from commands import run
from datasets import picture, write
from faulty import NO_RETRY, QuietHandler, serving
from folder_server import folder_server
from PIL import Image
from servers import STORE_CALLS

import streamloader as sl
from streamloader.errors import StreamloaderError
from streamloader.storage import open_store
from streamloader.storage.retry import cause_of, storage_error
from streamloader.storage.url import parse_location, redact

# constant, since they are in the names of tests
SECRET = f"wJalr/{uuid.UUID(int=11**29).hex}+K"  # the keys of AWS have slashes
TOKEN = f"tok{uuid.UUID(int=7**37).hex}"
PASSWORD = f"pw{uuid.UUID(int=5**41).hex}"
PLANTED = (SECRET, TOKEN, PASSWORD)
FORMS = [form for value in PLANTED for form in (value, quote(value), quote(value, safe=""), b64encode(value.encode()))]


def assert_clean(text, *also):
    for form in (*FORMS, *also):
        shown = form.decode().rstrip("=") if isinstance(form, bytes) else form
        assert shown not in text, text


class Echo(QuietHandler):
    """Answers every request with an error that has what was sent, and more."""

    status = 403
    given = ""  # the secrets that the client was given

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        sent = f"{self.headers} {self.given} https://user:{PASSWORD}@host/x?X-Amz-Signature={TOKEN}&sig={TOKEN}"
        sent = " ".join(sent.split())
        error = f"<Error><Code>AccessDenied</Code><Message>{sent}</Message><Token-0>{TOKEN}</Token-0></Error>".encode()
        self.responses = {self.status: (f"No {self.given}", "")}
        self.respond(self.status, error, {"Location": f"http://user:{PASSWORD}@127.0.0.1:9/x?X-Amz-Signature={TOKEN}"})

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET


@contextlib.contextmanager
def echo(way, status):
    """Run a server that always fails; yield URL and options that lead there. 0: nobody listens there."""
    handler = type("Handler", (Echo,), {"status": status})
    with serving(handler) as server:
        url, options = WAYS[way](server.server_port)
        handler.given = " ".join(value for value in PLANTED if value in f"{url} {options}")
        if status:
            yield url, options
    if not status:
        yield url, options


def s3(port, **more):
    options = {"token": TOKEN, "endpoint_url": f"http://user:{PASSWORD}@127.0.0.1:{port}", **more}
    return f"s3://AKIDEXAMPLE:{SECRET}@bucket/folder", options


# how a store is reached: URL and options
WAYS = {
    "s3 sockets": s3,
    "s3 line break": lambda port: s3(port, token=f"{TOKEN}\n"),
    "http obstore": lambda port: (f"http://{TOKEN}@127.0.0.1:{port}/folder", {}),
    "http fsspec": lambda port: (f"http://user:{PASSWORD}@127.0.0.1:{port}/folder", {"encoded": False}),
    "http headers": lambda port: (f"http://127.0.0.1:{port}/folder", {"headers": {"Authorization": f"Bearer {TOKEN}"}}),
    "chain": lambda port: (f"simplecache::http://user:{PASSWORD}@127.0.0.1:{port}/folder", {}),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("status", [403, 404, 307, 0])
def test_no_failure_shows_a_secret(way, status, caplog):
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "streamloader")
    failed = 0
    with echo(way, status) as (url, options):
        store = open_store(url, {**options, "retry": NO_RETRY})
        for name in sorted(STORE_CALLS):  # "get" before "put", which may leave a local copy
            try:
                STORE_CALLS[name](store)
            except StreamloaderError as error:
                failed += 1
                assert_clean("".join(traceback.format_exception(error)) + repr(error) + repr(error.__cause__))
    assert failed >= 4
    assert_clean(f"{store!r} {store.url} {store.location!r} {store.location}")
    assert_clean(caplog.text + "".join(str(vars(record)) for record in caplog.records))


@pytest.mark.parametrize("way", ["s3 sockets", "http obstore"])
def test_no_failure_of_a_dataset_or_a_command_shows_a_secret(way, tmp_path, capfd):
    with echo(way, 403) as (url, options):
        for use in (
            lambda: sl.StreamingDataset(url, batch_size=1, storage_options=options),
            lambda: sl.open(url, storage_options=options),
            lambda: sl.convert(url, tmp_path / "out", source_options=options, workers=0),
            lambda: sl.convert([{"x": 1}], url, storage_options=options, workers=0),
        ):
            with pytest.raises(StreamloaderError) as caught:
                use()
            assert_clean("".join(traceback.format_exception(caught.value)))
        pairs = [f"--storage-option={name}={value}" for name, value in options.items()]
        status, out, err = run(capfd, "inspect", url, *pairs)
        assert status == 2 and "error:" in err
        assert_clean(out + err)


@pytest.mark.long
def test_no_use_of_a_dataset_shows_a_secret(moto, tmp_path, caplog, capfd):
    """Moto takes any key, so what is planted works."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "streamloader")
    address = moto.endpoint.removeprefix("http://")
    plain = moto.url("photos")
    source = open_store(plain, moto.storage_options)
    for i in range(8):
        Image.fromarray(picture(i)).save(tmp_path / "one.png")
        source.put(f"class{i % 2}/{i:03}.png", (tmp_path / "one.png").read_bytes())
    url = plain.replace("s3://", f"s3://AKIDEXAMPLE:{SECRET}@")
    options = {"token": TOKEN, "endpoint_url": f"http://user:{PASSWORD}@{address}"}
    shown = []
    note = lambda progress: shown.append(repr(progress))  # noqa: E731
    report = sl.convert(url, f"{url}-out", storage_options=options, workers=0, progress=note)

    def stop(progress):
        if progress.phase == "write":
            raise InterruptedError("stopped")

    with pytest.raises(InterruptedError):
        sl.convert(url, tmp_path / "stopped", source_options=options, workers=0, progress=stop)
    dataset = sl.StreamingDataset(f"{url}-out", batch_size=4, storage_options=options)
    iterator = iter(dataset)
    next(iterator)
    shown += [repr(report), repr(dataset), str(dataset.stats()), json.dumps(dataset.state_dict()), repr(iterator)]
    pairs = [f"--storage-option={name}={value}" for name, value in options.items()]
    for arguments in (("inspect", f"{url}-out"), ("plan", f"{url}-out", "--batch-size", "4"), ("verify", f"{url}-out")):
        status, out, err = run(capfd, *arguments, *pairs)
        assert status == 0, err
        shown += [out, err]
    written = open_store(f"{plain}-out", moto.storage_options)
    shown += [written.get(entry.path).decode("latin-1") for entry in written.list()]
    shown += [path.read_bytes().decode("latin-1") for path in (tmp_path / "stopped").rglob("*") if path.is_file()]
    assert (tmp_path / "stopped/_streamloader/job.json").exists()
    for text in (*shown, caplog.text, *capfd.readouterr()):
        assert_clean(text, "AKIDEXAMPLE")


def test_a_dataset_behind_a_password_is_read_without_showing_it(tmp_path):
    write(tmp_path / "data", 64, ["x"])
    with folder_server(tmp_path / "data") as server:
        url = server.url.replace("http://", f"http://{TOKEN}@")
        dataset = sl.StreamingDataset(url, batch_size=8)
        assert sum(len(batch["x"]) for batch in dataset) == 64
        assert_clean(str(dataset.stats()) + json.dumps(dataset.state_dict()) + repr(dataset))


@pytest.mark.parametrize(
    "text",
    [
        f"s3://AKIDEXAMPLE:{SECRET}@bucket/x",
        f"GET http://{TOKEN}@host/x failed",
        f"'https://user:{PASSWORD}@host:9000/x'",
        f"simplecache::s3://KEY:{SECRET}@bucket/x",
        f"https://host/x?X-Amz-Signature={TOKEN}&X-Amz-Date=1",
        f"/x?sig={TOKEN}&sv=1",
        f"x-amz-security-token: {TOKEN}",
        f"https://host/x?token={TOKEN}",
        f"<Error><Token-0>{TOKEN}</Token-0></Error>",
        f"http://user:p@{PASSWORD}@host:9000/x",
        f"http://user:p/{PASSWORD}@host/x",
        f"{{'X-Amz-Security-Token': b'{TOKEN}'}}",
        f"{{b'Authorization': b'Basic {TOKEN}'}}",
        f"Authorization: {TOKEN}",
        f"Proxy-Authorization: Basic {TOKEN}",
        f"X-Goog-Credential={TOKEN}",
        f"aws_secret_access_key = {SECRET}",
        f"{{'password': '{PASSWORD}'}}",
        f"Set-Cookie: {TOKEN}",
    ],
)
def test_urls_and_signatures_are_redacted_wherever_they_are(text):
    assert_clean(redact(text))


@pytest.mark.parametrize(
    "text",
    [
        "abfss://box@account.dfs.core.windows.net/x",
        "s3://bucket/a@b",
        "http://host:9000/a@b",
        "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/p/a@b",
        "http://[::1]:9000/a@b",
        "file://C:/a@b",
        "give key and secret (or anon=True) in storage_options",
    ],
)
def test_text_without_a_secret_is_kept(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "options",
    [
        {"secret": SECRET},
        {"secret": f"{SECRET}\n"},
        {"client_kwargs": {"aws_secret_access_key": SECRET}},
        {"account_key": SECRET},
        {"connection_string": f"DefaultEndpointsProtocol=https;AccountKey={SECRET};EndpointSuffix=x"},
        {"sas_token": f"sv=2026-01-01&sig={quote(SECRET, safe='')}"},
        {"token": {"type": "service_account", "private_key": SECRET}},
        {"headers": {"Authorization": f"Bearer {SECRET}"}},
        {"s3_additional_kwargs": {"SSECustomerKey": SECRET}},
        {"headers": {"X-Ours": SECRET}},
        {"headers": [("X-Ours", SECRET)]},
        {"headers": {b"Authorization": f"Bearer {SECRET}".encode()}},
        {"client_kwargs": {"cookies": {"sid": SECRET}}},
        {"params": {"id": SECRET}},
        {"passphrase": SECRET},
        {"pwd": SECRET},
        {"sas_token": f"?sv=2026-01-01&sig={quote(SECRET, safe='')}"},
    ],
)
def test_values_of_secret_options_are_redacted_in_a_clients_text(options):
    location = parse_location("az://box/x", options)
    error = ConnectionError("without a secret")
    error.__cause__ = OSError(f"denied: {SECRET} {quote(SECRET, safe='')} {b64encode(SECRET.encode()).decode()}")
    ours = storage_error(error, location)
    ours.__cause__ = cause_of(error, location)
    assert_clean("".join(traceback.format_exception(ours)) + repr(location))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_SESSION_TOKEN", SECRET),
        ("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=x;AccountKey={SECRET};EndpointSuffix=y"),
        ("HTTPS_PROXY", f"http://user:{quote(SECRET, safe='')}@proxy:3128"),
        ("HTTPS_PROXY", f"user:{quote(SECRET, safe='')}@proxy:3128"),
    ],
)
def test_secrets_of_the_environment_are_redacted(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    location = parse_location("s3://bucket/x", {})
    error = OSError(f"{value} {SECRET} {quote(SECRET, safe='')}")
    ours = storage_error(error, location)
    assert_clean(str(ours) + repr(cause_of(error, location)))


def test_a_password_with_an_at_sign_is_taken_from_the_url():
    location = parse_location(f"http://us%40er:p@{PASSWORD}@host/x", {})
    assert location.target == "http://host/x"
    basic = b64encode(f"us@er:p@{PASSWORD}".encode()).decode()
    assert location.options["headers"] == {"Authorization": f"Basic {basic}"}


def test_harmless_causes_are_kept():
    error = OSError("disk failure")
    assert cause_of(error, parse_location("s3://bucket", {"secret": SECRET})) is error
