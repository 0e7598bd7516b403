#!/bin/sh
# Installs Chromium and its driver (Debian, Ubuntu), which tests/integrations/test_view_browser.py uses. Run it as root.
set -eu
command -v chromedriver > /dev/null && exit 0
[ "$(id -u)" = 0 ] || { echo "run this as root" >&2; exit 1; }
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core > /dev/null
