#!/bin/sh
# Installs nginx and its Lua module (Debian, Ubuntu). `python -m bench` starts its own with a configuration of its own;
# the service of the distribution is not needed, and policy-rc.d keeps the installation from starting it.
set -eu
[ "$(id -u)" = 0 ] || { echo "run this as root" >&2; exit 1; }
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends nginx libnginx-mod-http-lua openssl
