#!/usr/bin/env bash
# Installs the Debian packages that the tests use. Without root or sudo it says what is missing; the
# tests that need it then skip, and fail in CI.
set -euo pipefail

declare -A commands=(
  [docker-compose]=docker-compose
  [systemd-analyze]=systemd
  [promtool]=prometheus
  [ip]=iproute2
  [nft]=nftables
  [radosgw]=radosgw
  [ceph-mon]=ceph-mon
  [ceph-osd]=ceph-osd
)

missing=()
for command in "${!commands[@]}"; do
  command -v "$command" >/dev/null || missing+=("${commands[$command]}")
done
# No commands of their own; the first brings Java.
[ -e /usr/share/java/zookeeper.jar ] || missing+=(zookeeper)
[ -e /usr/share/java/slf4j-simple.jar ] || missing+=(libslf4j-java)
if [ ${#missing[@]} -eq 0 ]; then
  echo "servers: all Debian packages that the tests use are installed"
  exit 0
fi

if ! command -v apt-get >/dev/null; then
  echo "servers: not a Debian system; missing: ${missing[*]}" >&2
  exit 0
fi
sudo=()
if [ "$(id -u)" -ne 0 ]; then
  if ! sudo -n true 2>/dev/null; then
    echo "servers: missing ${missing[*]}; install with: sudo apt-get install ${missing[*]}" >&2
    exit 0
  fi
  sudo=(sudo)
fi
echo "servers: installing ${missing[*]}"
"${sudo[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
