#!/bin/bash
# serve.sh DIR HOST PORT: one monitor, one store and one gateway on the data in DIR, made where there is none.
# S3_ACCESS_KEY and S3_SECRET_KEY are the credentials of its only user. Ends, with all of it, where one of them ends.
set -euo pipefail
root=$1 host=$2 port=$3 monitor_port=${S3_MONITOR_PORT:-3300}
mkdir -p "$root"
cd "$root"
[ -e fsid ] || uuidgen > fsid
cat > ceph.conf <<CONF
[global]
fsid = $(cat fsid)
mon host = v2:127.0.0.1:$monitor_port
ms bind msgr1 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth allow insecure global id reclaim = true
mon warn on insecure global id reclaim allowed = false
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
run dir = $root
admin socket = $root/\$name.asok
log file = $root/\$name.log
pid file = $root/\$name.pid
keyring = $root/keyring
[mon.a]
mon data = $root/mon
[osd]
osd data = $root/osd
osd objectstore = bluestore
bluestore block size = ${S3_STORE_BYTES:-10737418240}
bluestore block create = true
[client.rgw]
keyring = $root/keyring
rgw data = $root/rgw
rgw frontends = beast endpoint=$host:$port
rgw enable usage log = false
rgw enable ops log = false
rgw run sync thread = false
rgw enable apis = s3, admin
rgw dns name = localhost
CONF
of=(-c "$root/ceph.conf")
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
if [ ! -e made ]; then
  rm -rf mon osd rgw keyring monmap
  mkdir mon osd rgw
  ceph-authtool --create-keyring keyring --gen-key -n mon. --cap mon 'allow *'
  ceph-authtool keyring --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
  ceph-authtool keyring --gen-key -n client.rgw --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
  ceph-authtool keyring --gen-key -n osd.0 --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
  monmaptool --create --fsid "$(cat fsid)" --addv a "[v2:127.0.0.1:$monitor_port]" monmap
  ceph-mon "${of[@]}" --mkfs -i a --monmap monmap --keyring keyring
fi
ceph-mon "${of[@]}" -i a -f &
if [ ! -e made ]; then
  store=$(uuidgen)
  ceph "${of[@]}" osd create "$store"
  ceph-osd "${of[@]}" -i 0 --mkfs --osd-uuid "$store"
fi
ceph-osd "${of[@]}" -i 0 -f &
radosgw "${of[@]}" -n client.rgw -f &
if [ ! -e made ]; then
  radosgw-admin "${of[@]}" -n client.rgw user create --uid=penstock --display-name=penstock \
    --access-key="$S3_ACCESS_KEY" --secret-key="$S3_SECRET_KEY"
  touch made
fi
wait -n
