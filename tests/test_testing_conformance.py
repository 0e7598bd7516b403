"""The conformance suite of stores: each law fails on a store that does not keep it, and the report says so."""

import json

import pytest
from torchrun import run_python

import streamloader.storage.generic as generic
from streamloader.errors import StorageError, UsageError
from streamloader.storage import open_store
from streamloader.storage.objects import ObjectInfo
from streamloader.testing.conformance import LAWS, LawError, Place, check_store, main


def on(name, **changes):
    """The law, and a store that keeps it but for these methods, each a function of the original method and its call."""
    (law,) = [law for law in LAWS if name in law.name]
    return pytest.param(law, changes, id=f"{law.name} {'-'.join(changes)}")


def stale(original, client, path, *rest, seen={}):  # noqa: B006 - what was read before
    return seen.setdefault((id(client), path), original(client, path, *rest))


def forgets_etag(original, client, path):
    info = original(client, path)
    return info and info._replace(size=info.size + 1)


def halves(original, client, path, data, *rest):
    return original(client, path, bytes(memoryview(data[0] if isinstance(data, list) and data else data))[:5], *rest)


BROKEN = [
    on("content, size and etag", info=forgets_etag),
    on("content, size and etag", put=halves),
    on("every buffer", put=halves),
    on("empty object", list_page=lambda original, *call: ([], None)),
    on("is a slice", get_range=lambda original, c, p, a, b, *r: original(c, p, a, b + 1, *r)),
    on("suffix range", get_tail=lambda original, c, p, size: original(c, p, size + 1)),
    on("many threads", get_range=lambda original, c, p, a, b, *r: original(c, p, 0, b - a, *r)),
    on("a missing object", info=lambda original, c, p: original(c, p) or ObjectInfo(p, 0)),
    on("a missing object", get_tail=lambda original, c, p, n: original(c, p, n) if p.endswith("digits") else b""),
    on("create does not", create=lambda original, c, p, data: c.put(p, data)),
    on("of many creates", create=lambda original, c, p, data: c.put(p, data)),
    on("replace writes only", replace=lambda original, c, p, data, before: c.put(p, data)),
    on("of many replaces", replace=lambda original, c, p, data, before: c.put(p, data)),
    on("recursive", list_page=lambda original, c, f, t: (list(original(c, f, t)[0])[1:], None)),
    on("recursive", folders=lambda original, c, f: []),
    on("each object once", list_page=lambda original, c, f, t: (list(original(c, f, t)[0])[:100], None)),
    on("order of the bytes", list_page=lambda original, c, f, t: (sorted(original(c, f, t)[0])[::-1], None)),
    on("can replace a folder", delete=lambda original, c, paths: None),
    on("deleting ignores", delete=lambda original, c, paths: [c.info(p).size for p in paths] and None),
    on("names are kept", put=lambda original, c, p, d: original(c, p.replace("ü", "u\u0308"), d)),
    on("reads and listings", get_range=stale),
    on("reads and listings", info=stale),
    on("reads and listings", delete=lambda original, c, paths: None),
    on("one of its contents", put=lambda original, c, p, d: [original(c, p, part) for part in (bytes(d)[:9], d)][-1]),
    on("time of the last", modified=lambda original, c, p: None),
]


@pytest.mark.parametrize(("law", "changes"), BROKEN)
def test_a_law_fails_on_a_store_that_does_not_keep_it(law, changes, tmp_path, monkeypatch):
    for name, change in changes.items():
        original = getattr(generic.LocalClient, name)
        monkeypatch.setattr(generic.LocalClient, name, lambda *call, o=original, c=change: c(o, *call))
    place = Place(open_store(tmp_path / "data", {"retry": {"outage_seconds": 0, "request_seconds": 0}}), 120)
    with pytest.raises((LawError, StorageError, AttributeError)):
        law.check(place)


def test_every_law_about_all_stores_has_a_store_that_does_not_keep_it():
    broken = {each.values[0].name for each in BROKEN}
    kept = {law.name for law in LAWS if not law.protocol} - broken
    assert kept == {"an object and objects below it are separate"}  # which local files do not keep


def test_the_report_has_what_is_missing_and_what_the_loader_does_then(tmp_path, capsys):
    assert main([tmp_path.as_uri(), "--json", "--objects", "30"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["client"], len(report["laws"])) == (True, "file", len(LAWS))
    missing = [law for law in report["laws"] if law["holds"] is False]
    assert [law["law"] for law in missing] == ["an object and objects below it are separate"]
    assert "File exists" in missing[0]["detail"]
    assert not list(tmp_path.iterdir()), "the checks left something"


def test_a_store_without_a_required_law_is_no_store_to_train_from(tmp_path, monkeypatch):
    monkeypatch.setattr(generic.LocalClient, "get_tail", lambda *_: b"")
    report = check_store(str(tmp_path), objects=0)
    assert not report.ok
    text = str(report)
    assert "missing a suffix range is the end of the object\n" in text
    assert "found: the last 1 bytes: b'' instead of b'9'\n" in text
    assert "then:  shards and Parquet files cannot be read\n" in text
    assert "-       a listing has each object once" in text
    assert main([str(tmp_path), "--objects", "0"]) == 1


def test_a_store_that_cannot_be_used_is_an_error(tmp_path, capsys):
    with pytest.raises(UsageError, match="read only"):
        check_store("https://example.org/data")
    (tmp_path / "file").write_bytes(b"")
    assert main([str(tmp_path / "file" / "x")]) == 2
    assert "SL" in capsys.readouterr().err


def test_the_command_needs_nothing_but_the_package(tmp_path):
    found = run_python("-m", "streamloader.testing.conformance", tmp_path, "--objects", "3").stdout
    assert found.count("\nholds") == len([law for law in LAWS if not law.protocol]) - 1
