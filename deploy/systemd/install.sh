#!/bin/bash
# install.sh jobmanager|taskmanager ...: installs the units of these daemons on this machine, as root, from a checkout.
# May be repeated, to upgrade: each time makes a version of its own in /opt/penstock-versions, and links /opt/penstock to it
# when it is whole; configuration and state stay as they are. All daemons that run on this machine must be named: they begin
# again together. The version before stays, older ones go; VERSION=NAME goes back to one that is there, and makes none.
# DESTDIR=/some/root installs below it and starts nothing; EXTRAS=otel installs what that extra needs as well;
# PYTHON=/usr/bin/python3.12 runs the program, where python3 shall not.
set -euo pipefail
umask 022 # the daemons' user must be able to read the program
root=${DESTDIR:-} source=$(cd "$(dirname "$0")/../.." && pwd)
link=$root/opt/penstock versions=$root/opt/penstock-versions
refuse() { echo "install.sh: $1" >&2; exit 2; }
for role in "$@"; do
  case $role in jobmanager|taskmanager) ;; *) refuse "$role is neither jobmanager nor taskmanager" ;; esac
done
[ $# -gt 0 ] || { sed -n '2,8s/^# //p' "$0" >&2; exit 2; }
chosen=${VERSION:-} units=$source/deploy/systemd
if [ -n "$chosen" ]; then
  [[ $chosen != */* && -d $versions/$chosen/units ]] ||
    refuse "there is no version $chosen in $versions: $(ls "$versions" 2>/dev/null | tr '\n' ' ')"
  units=$versions/$chosen/units
fi
before=$(basename "$(readlink "$link" || true)")
running=()
if [ -z "$root" ]; then
  named=" $* "
  for role in jobmanager taskmanager; do
    systemctl is-active --quiet "penstock-$role" || continue
    [[ $named == *" $role "* ]] || refuse "penstock-$role runs here from the same program: name it as well, or stop it"
    running+=("penstock-$role")
  done
  id penstock >/dev/null 2>&1 ||
    useradd --system --home-dir /var/lib/penstock --shell /usr/sbin/nologin penstock
fi
if [ -z "$root$chosen" ]; then # nothing that runs is touched meanwhile
  new=$(sed -n 's/^version = "\(.*\)"/\1/p' "$source/pyproject.toml")-$(date --utc +%Y%m%dT%H%M%S)
  made=$versions/$new pip=$versions/$new/bin/pip wheels=$(mktemp -d)
  trap 'rm -rf "$wheels" "$made"' EXIT
  "${PYTHON:-python3}" -m venv "$made"
  setpriv --reuid penstock --regid penstock --clear-groups env "$made/bin/python" -c "" || {
    echo "install.sh: the user penstock cannot run $(readlink -f "$made/bin/python"): name a Python that every user can," \
      "PYTHON=/usr/bin/python3 for example" >&2
    exit 1
  }
  export PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1
  "$pip" wheel --no-deps --wheel-dir "$wheels" "$source"
  "$pip" install "$(echo "$wheels"/penstock-*.whl)${EXTRAS:+[$EXTRAS]}"
  install -D -m 0644 -t "$made/units" "$units"/*.service # last: with them it is whole
  rm -rf "$wheels"
  chosen=$new
fi
owned() { # file or directory of the daemons' user
  [ -n "$root" ] || chown penstock:penstock "$1"
}
install -d "$root/etc/systemd/system" "$root/etc/penstock"
[ -e "$root/etc/penstock/penstock.env" ] ||
  install -m 0600 "$source/deploy/systemd/penstock.env" "$root/etc/penstock/penstock.env"
for role in "$@"; do
  state=$root/var/lib/penstock-$role
  install -d -m 0700 "$state" && owned "$state"
  if [ ! -e "$state/penstock.yaml" ]; then
    install -m 0600 "$source/deploy/config/penstock.yaml" "$state/penstock.yaml" && owned "$state/penstock.yaml"
  fi
done
# A daemon loads code while it runs, so none runs while the link is switched; whatever fails, what ran before runs again.
trap 'for unit in "${running[@]}"; do systemctl start "$unit"; done' EXIT
for unit in "${running[@]}"; do systemctl stop "$unit"; done
if [ -n "$chosen" ]; then
  if [ -d "$link" ] && [ ! -L "$link" ]; then # of a time without versions
    before=before
    install -d "$link/units"
    find "$root/etc/systemd/system" -maxdepth 1 -name "penstock-*.service" -exec cp -t "$link/units" {} +
    mv "$link" "$versions/before"
  fi
  ln -sfn "penstock-versions/$chosen" "$link.new" && mv -T "$link.new" "$link"
fi
for role in "$@"; do install -m 0644 "$units/penstock-$role.service" "$root/etc/systemd/system/"; done
if [ -z "$root" ]; then
  systemctl daemon-reload
  for role in "$@"; do
    systemctl enable "penstock-$role"
    systemctl restart "penstock-$role"
  done
fi
if [ -z "$root${VERSION:-}" ]; then
  find "$versions" -mindepth 1 -maxdepth 1 ! -name "$chosen" ! -name "$before" -exec rm -rf {} +
fi
[ -z "$before" ] || echo "$chosen is in force; back to the one before: VERSION=$before $0 $*"
