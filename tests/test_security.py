"""What SECURITY.md promises: no code that runs what it reads, and limits for what strangers have written."""

import ast
import io
import re
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import videos
from datasets import within, write_images
from faulty import QuietHandler, serving
from PIL import Image

import streamloader as sl
from streamloader.errors import AccessError, DecodeError, FieldError, SourceError, UsageError
from streamloader.format.video import count_frames, index_video
from streamloader.images.decode import ImageDecoder
from streamloader.options import MAX_PIXELS
from streamloader.storage import open_store
from streamloader.storage.generic import METADATA_ADDRESSES, is_cloud_service

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "streamloader"

# ---- the scan

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {  # by rule; a name without a dot is a builtin, "*.name" a method
    "runs text": {"eval", "exec", "compile", "__import__", "runpy.run_path", "code.interact"},
    "runs a shell": {"os.system", "os.popen", "asyncio.create_subprocess_shell", "subprocess.getoutput"},
    "predictable temporary name": {"tempfile.mktemp", "os.tempnam", "os.tmpnam"},
    "extracts archives": {"*.extract", "*.extractall", "shutil.unpack_archive"},
    "listens": {
        *("*.bind", "*.listen", "socket.create_server", "asyncio.start_server", "*.HTTPServer", "*.TCPServer"),
        *("*.TCPSite", "*.start_http_server"),
    },
    "unpickles": {"torch.load", "pandas.read_pickle", "pd.read_pickle", "*.read_pickle"},
}
OPTIONS = {"shell": "runs a shell", "allow_pickle": "unpickles"}  # which may be False
PLACES = re.compile(r"/(tmp|var/tmp|dev/shm)(/|\Z)")  # fixed names there can be taken by another user
LOOPBACK = ("127.0.0.1", "::1", "localhost")

ALLOWED = {
    (
        "storage/url.py",
        "",
        "pickle",
    ): "tries whether worker processes can load the user's credential_provider; dumps only",
    ("engine/messages.py", "", "pickle"): "messages on socket pairs between a process and its own workers",
    ("engine/transform.py", "", "pickle"): "tries whether workers can load the user's transform; dumps only",
    ("conversion/sources/objects.py", "", "pickle"): "sends the user's own object to our workers, through a pipe",
    ("storage/process.py", "lock_name", "listens"): "an abstract Unix name, which serves as a lock; nothing listens",
    ("storage/generic.py", "HttpClient.__init__", "listens"): "inspect's Signature.bind",
    ("pytorch/dataset.py", "TorchLoader.__new__", "listens"): "inspect's Signature.bind",
    ("view/server.py", "Server.start", "listens"): "the viewer, on loopback unless its user names an address",
    ("metrics/exporters.py", "Server.__init__", "listens"): "Prometheus, where its user says",
    ("measure/doctor.py", "check_machine", "predictable temporary name"): "asks for its size only",
    ("testing/proxy.py", "_Server.start", "listens"): "the tests' proxy, on loopback unless its user names an address",
    ("storage/s3_http.py", "_tls_context", "trusts every certificate"): "the user's verify=False",
}


def findings(source: str) -> Iterator[tuple[str, str, int]]:
    """Yield the rule that a line breaks, its function, and the line."""
    todo: list[tuple[ast.AST, str]] = [(ast.parse(source), "")]
    while todo:
        node, function = todo.pop()
        yield from ((rule, function, getattr(node, "lineno", 0)) for rule in rules(node))
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.JoinedStr):  # only its first text can be the beginning of a path
            children = [each for each in children if not isinstance(each, ast.Constant) or each is node.values[0]]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            children = []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        todo += [(child, function) for child in children]


def rules(node: ast.AST) -> Iterator[str]:
    """Yield the rules that one node breaks."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        yield from ("pickle" for module in modules if module.split(".")[0] in PICKLES)
        yield from ("yaml" for module in modules if module.split(".")[0] in ("yaml", "ruamel"))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and PLACES.match(node.value):
        yield "predictable temporary name"
    if isinstance(node, ast.Attribute) and node.attr in ("CERT_NONE", "_create_unverified_context"):
        yield "trusts every certificate"
    if not isinstance(node, ast.Call):
        return
    name = dotted(node.func)
    method = f"*.{name.rpartition('.')[2]}" if "." in name else ""
    for rule, names in CALLS.items():
        harmless = is_loopback(node) if rule == "listens" else rule == "unpickles" and loads_weights(node)
        if (name in names or method in names) and not harmless:
            yield rule
    for keyword in node.keywords:
        is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in OPTIONS and not is_false:
            yield OPTIONS[keyword.arg]


def dotted(node: ast.AST) -> str:
    """The name of what is called, such as "os.path.join"; what is no name is left out: ".join"."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def loads_weights(call: ast.Call) -> bool:
    """Whether torch.load reads tensors only."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}.get("weights_only")
    return isinstance(given, ast.Constant) and given.value is True


def is_loopback(call: ast.Call) -> bool:
    """Whether the first argument is an address of this machine only."""
    first = call.args[0] if call.args else None
    host = first.elts[0] if isinstance(first, ast.Tuple) and first.elts else None
    return isinstance(host, ast.Constant) and host.value in LOOPBACK


def test_the_package_runs_nothing_that_it_reads_and_serves_nobody_else():
    found = {
        (path.relative_to(PACKAGE).as_posix(), function, rule): line
        for path in sorted(PACKAGE.rglob("*.py"))
        for rule, function, line in findings(path.read_text())
    }
    assert not {place: line for place, line in found.items() if place not in ALLOWED}, "remove it, or give a reason"
    assert not ALLOWED.keys() - found.keys(), "these exceptions are not needed any more"


PLANTS = [
    *(
        "import pickle",
        "from dill import loads",
        "import yaml",
        "def f():\n    import marshal",
        "from shelve import open",
    ),
    *("eval('1')", "exec(text)", "compile(text, '', 'exec')", "__import__(name)", "os.system('ls')", "os.popen('ls')"),
    *("subprocess.run('ls', shell=True)", "subprocess.Popen(command, shell=choice)", "tempfile.mktemp()"),
    *(
        "open('/tmp/streamloader.lock')",
        "Path(f'/dev/shm/{name}')",
        "np.load(file, allow_pickle=True)",
        "torch.load(file)",
    ),
    *(
        "sock.bind(('', 80))",
        "sock.bind(('0.0.0.0', 0))",
        "socket.create_server(address)",
        "server.HTTPServer(('', 1), h)",
    ),
    *("archive.extractall(folder)", "shutil.unpack_archive(file)", "context.verify_mode = ssl.CERT_NONE"),
]


@pytest.mark.parametrize("plant", PLANTS)
def test_the_scan_finds_a_plant(plant):
    assert list(findings(plant))
    nested = "class A:\n    async def f(self):\n" + "".join(f"        {line}\n" for line in plant.splitlines())
    assert {rule for rule, _, _ in findings(nested)} == {rule for rule, _, _ in findings(plant)}


@pytest.mark.parametrize(
    "harmless",
    [
        *("re.compile('x')", "ast.literal_eval(x)", "sock.bind(('127.0.0.1', 0))", "np.load(f, allow_pickle=False)"),
        *(
            '"""/tmp/x is a folder."""',
            "subprocess.Popen(command, shell=False)",
            "model.eval()",
            "json.load(file)",
            "torch.load(f, weights_only=True)",
            "f'{folder}/tmp'",
        ),
    ],
)
def test_the_scan_leaves_other_code_alone(harmless):
    assert not list(findings(harmless))


def test_the_limits_of_the_page_are_those_of_the_code():
    page = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\|.*\| `([\w/]+\.py)` `(\w+)` = ([\d,]+)( [KMG]iB)? \|$", page, re.MULTILINE)
    assert len(rows) >= 12
    for path, name, number, unit in rows:
        source = re.search(rf"^{name}(?:: \w+)? = (.*?)(?:  #.*)?$", (PACKAGE / path).read_text(), re.MULTILINE)
        assert source, f"{path} has no {name}"
        said = int(number.replace(",", "")) << {"": 0, " KiB": 10, " MiB": 20, " GiB": 30}[unit]
        assert abs(eval(source[1], {"MIB": 1 << 20}) - said) <= 64, f"{path}: {name}"


# ---- images


def bomb(kind: str, side: int = 60_000) -> bytes:
    """A small file whose header says that it has side x side pixels; that of PNG really has the first rows."""
    if kind == "jpeg":
        out = io.BytesIO()
        Image.new("RGB", (64, 64)).save(out, "JPEG")
        data = out.getvalue()
        at = data.index(b"\xff\xc0") + 5
        return data[:at] + struct.pack(">HH", side, side) + data[at + 4 :]
    if kind in ("png", "gray"):
        packer, rows = zlib.compressobj(9), bytes(1 + side * (3 if kind == "png" else 1))
        pixels = b"".join(packer.compress(rows) for _ in range(200)) + packer.flush()
        header = struct.pack(">IIBBBBB", side, side, 8, 2 if kind == "png" else 0, 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in chunks
        )
    if kind == "bmp":
        return b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    if kind == "gif":
        return (
            b"GIF89a" + struct.pack("<HHBBB", side, side, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, side, side, 0)
        )
    if kind == "webp":
        size = (side - 1) | (side - 1) << 14
        return b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8L" + struct.pack("<IBI", 5, 0x2F, size & 0xFFFFFFFF) + b"\0"
    return f"P6 {side} {side} 255\n".encode()


def decoders(**options):
    for backend in ("auto", "pillow"):
        yield ImageDecoder.choose(sl.Decode(backend=backend, size=(32, 32), **options), "image")
    yield ImageDecoder.choose(sl.Decode(size=(32, 32), device="cpu", **options), "image")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jpeg", "png", "gray", "bmp", "gif", "webp", "ppm"])
def test_an_image_of_too_many_pixels_is_not_decoded(kind):
    side = 16_383 if kind == "webp" else 60_000  # its greatest
    data = memoryview(bomb(kind, side))
    with within(16 << 20):
        for decoder in decoders():
            with pytest.raises(DecodeError, match=r"does not decode as an image"):
                decoder.decode(data, 0, crop=np.zeros(10, np.int64))


@pytest.mark.long
def test_a_real_bomb_of_a_dataset_is_a_bad_sample_in_bounded_memory(tmp_path):
    images = [bomb("png") if i % 4 == 1 else bomb("jpeg", 64) for i in range(16)]
    write_images(tmp_path / "data", images, "mixed")
    program = (
        "import sys, streamloader as sl\n"
        "def peak(): return int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1]) >> 10\n"
        "dataset = sl.NumpyDataset(sys.argv[1], batch_size=8, decode=sl.Decode(size=(32, 32)), on_error='mask')\n"
        "before = peak()\n"
        "for batch in dataset: pass\n"
        "print(dataset.stats().bad_samples, peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "data")], capture_output=True, text=True, check=True, timeout=100
    )
    bad, grown = map(int, done.stdout.split())
    assert bad == 4
    assert grown < 300, "MB; the pixels of one would take 10,800"


def test_the_limit_of_pixels_is_an_option_in_both_directions(monkeypatch):
    out = io.BytesIO()
    Image.new("L", (300, 200)).save(out, "PNG")
    small = memoryview(out.getvalue())
    for decoder in decoders(max_pixels=60_000):
        decoder.decode(small, 0)
    for decoder in decoders(max_pixels=59_999):
        with pytest.raises(DecodeError, match=r"300 x 200 pixels are more than Decode\(max_pixels=59999\)"):
            decoder.decode(small, 0)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # for the other tests
    decoder = ImageDecoder.choose(sl.Decode(backend="pillow", size=(32, 32), max_pixels=4_000_000_000), "image")
    assert decoder.measure(memoryview(bomb("png")), 0).size == (60_000, 60_000)
    with pytest.raises(UsageError, match="max_pixels"):
        sl.Decode(max_pixels=0)
    assert sl.Decode().max_pixels == MAX_PIXELS


# ---- files and addresses


@pytest.fixture
def linked(tmp_path):
    """A folder of images, two of which are links to files and folders elsewhere."""
    real, root = tmp_path / "real", tmp_path / "photos"
    for path in (real / "cat" / "a.png", real / "dog.png", root / "ant" / "x.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    (root / "cat").symlink_to(real / "cat")
    (root / "ant" / "dog.png").symlink_to(real / "dog.png")
    (real / "cat" / "back").symlink_to(root)
    return root


def test_links_that_lead_out_of_a_source_are_followed_on_request_only(linked, tmp_path):
    with pytest.raises(SourceError, match=r"is a link to .*give source_options=\{'follow_symlinks': True\}"):
        sl.convert(linked, tmp_path / "out", workers=0)
    report = sl.convert(linked, tmp_path / "out", workers=0, source_options={"follow_symlinks": True})
    assert sum(manifest.num_samples for manifest in report.manifests.values()) == 3


@pytest.mark.long
def test_names_in_an_archive_are_only_text(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("../../outside.txt", "/etc/outside.txt"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    before = set(tmp_path.parent.rglob("*"))
    sl.convert(tmp_path / "a.tar", tmp_path / "out", workers=0)
    assert [sample["txt"] for sample in sl.open(tmp_path / "out")] == ["abc", "abc"]
    new = set(tmp_path.parent.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "out") for path in new)


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "fe80::1", "::ffff:169.254.169.254", *METADATA_ADDRESSES, "0xA9FEA9FE"]
)
def test_addresses_of_metadata_services_are_known(host):
    assert is_cloud_service(host)
    assert not is_cloud_service("127.0.0.1")


class Redirecting(QuietHandler):
    def do_GET(self):
        self.respond(302, b"", {"Location": "http://169.254.169.254/latest/meta-data"})

    do_HEAD = do_GET


def test_a_web_server_cannot_redirect_to_a_metadata_service():
    with serving(Redirecting) as server:
        store = open_store(f"{server.endpoint}/folder", {"encoded": False})
        for read in (lambda: store.get("a"), lambda: store.read("a", 0, 2)):
            with pytest.raises(AccessError, match=r"redirects to another host, 'http://169.254.169.254"):
                read()


@pytest.mark.parametrize("kind", ["h264", "hevc", "vp9"])
def test_frames_of_a_video_have_the_limit_of_images(kind, monkeypatch):
    data = videos.encode(kind, frames=4)
    assert count_frames(data) == 4
    monkeypatch.setattr("streamloader.format.video.MAX_PIXELS", 100)
    with pytest.raises(FieldError, match="no video that can be read"):
        index_video("clip", data, 0)
