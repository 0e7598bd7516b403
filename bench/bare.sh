#!/bin/sh
# Collects in a folder what `python -m bench.device` needs on a machine that has a GPU, CUDA, torch and torchvision, but
# no access to packages: run this where there is access, with pip and apt, and take the folder along.
#
#     sh bench/bare.sh bench/.bare            # on this machine; prints its size
#     . bench/.bare/env                       # on that machine, in the root of the repository: installs for this shell
#     python3 -m bench.device
set -eu
folder=${1:?a folder to collect in} version=${2:-3.12}
cd "$(dirname "$0")/.."
python=.venv/bin/python  # of `make install`
[ -x "$python" ] || python=python3
mkdir -p "$folder/wheels" "$folder/debs"
folder=$(cd "$folder" && pwd)

# torch, torchvision, numpy, OpenCV, pyarrow, pillow, matplotlib, rich and scikit-learn are there
packages="zarr donfig numcodecs google-crc32c crc32c obstore botocore jmespath s3fs fsspec aiobotocore aioitertools simplejpeg torchcodec"
platforms=$(for n in 35 34 28 27 24 17; do printf -- '--platform manylinux_2_%s_x86_64 ' $n; done)
for name in $packages; do
    pinned=$(grep -i "^$name==" constraints.txt | head -n 1 | cut -d ';' -f 1 || true)
    # shellcheck disable=SC2086
    $python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$version" \
        --implementation cp $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
        --dest "$folder/wheels" "${pinned:-$name}"
done

(cd "$folder/debs" && apt-get download -qq nginx libpcre2-8-0)
for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$folder/nginx"; done
rm -r "$folder/debs"

$python - "$folder/photos" <<'PYTHON'
import sys
from pathlib import Path

from bench.photos import OF_SKIMAGE, photographs

folder = Path(sys.argv[1])
photographs(folder)
for path in sorted(folder.rglob("*"), reverse=True):  # of the wheel, the pictures alone
    if path.is_dir():
        path.rmdir() if not any(path.iterdir()) else None
    elif path.name not in OF_SKIMAGE:
        path.unlink()
PYTHON

# the C extensions work with each Python from 3.11 on; without them the loader does the same in Python
$python setup.py -q build_ext --build-lib "$folder/lib" --build-temp "$folder/temp"
rm -r "$folder/temp"

cat > "$folder/env" <<'ENV'
# Read by the shell in the root of the repository: . FOLDER/env
_bare=$(cd "$(dirname "${BASH_SOURCE:-bench/.bare/env}")" && pwd)
[ -d /tmp/bare-site ] || python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --target /tmp/bare-site "$_bare"/wheels/*.whl
cp -r "$_bare/lib/streamloader" .
mkdir -p bench/.data && cp -r "$_bare/photos" bench/.data/
export PYTHONPATH="$PWD:/tmp/bare-site${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$_bare/nginx/usr/sbin:$PATH"
export LD_LIBRARY_PATH="$_bare/nginx/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
ENV
du -sh "$folder" | cut -f1
