#!/bin/bash
# install.sh jobmanager|taskmanager ...: installs the units of these daemons on this machine, as root, from a checkout.
# May be repeated: it upgrades the program, and leaves configuration and state as they are.
# DESTDIR=/some/root installs below it and starts nothing; EXTRAS=otel installs what that extra needs as well.
set -euo pipefail
root=${DESTDIR:-} source=$(cd "$(dirname "$0")/../.." && pwd)
for role in "$@"; do
  case $role in jobmanager|taskmanager) ;; *) echo "install.sh: $role is neither jobmanager nor taskmanager" >&2; exit 2 ;; esac
done
[ $# -gt 0 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }

if [ -z "$root" ]; then
  id penstock >/dev/null 2>&1 ||
    useradd --system --home-dir /var/lib/penstock --shell /usr/sbin/nologin penstock
  [ -x /opt/penstock/bin/python ] || python3 -m venv /opt/penstock
  /opt/penstock/bin/pip install --quiet --disable-pip-version-check "$source${EXTRAS:+[$EXTRAS]}"
fi
owned() { # file or directory of the daemons' user
  [ -n "$root" ] || chown penstock:penstock "$1"
}
install -d "$root/etc/systemd/system" "$root/etc/penstock"
[ -e "$root/etc/penstock/penstock.env" ] ||
  install -m 0600 "$source/deploy/systemd/penstock.env" "$root/etc/penstock/penstock.env"
for role in "$@"; do
  state=$root/var/lib/penstock-$role
  install -m 0644 "$source/deploy/systemd/penstock-$role.service" "$root/etc/systemd/system/"
  install -d -m 0700 "$state" && owned "$state"
  if [ ! -e "$state/penstock.yaml" ]; then
    install -m 0600 "$source/deploy/config/penstock.yaml" "$state/penstock.yaml" && owned "$state/penstock.yaml"
  fi
done
if [ -z "$root" ]; then
  systemctl daemon-reload
  for role in "$@"; do
    systemctl enable "penstock-$role"
    systemctl restart "penstock-$role"
  done
fi
