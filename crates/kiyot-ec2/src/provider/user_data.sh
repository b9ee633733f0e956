#!/bin/sh
# Makes a cell of this instance with an image of Debian 12 or Amazon Linux 2023. Without a cell it
# powers off.
set -eu
umask 077
export HOME=/root LC_ALL=C
directory=/var/lib/kiyot-cell
program=/usr/local/bin/kiyot-cell

finish() {
    status=$?
    [ "$status" = 0 ] || {
        echo "kiyot: the cell is not installed (status $status), powering off"
        systemctl poweroff
    }
}
trap finish EXIT
# A hanging step ends the instance too. The service has its own timer.
( sleep @POWER_OFF_AFTER_SECS@; systemctl is-active --quiet kiyot-cell || systemctl poweroff ) < /dev/null > /dev/null 2>&1 &

mkdir -p "$directory"
cat > "$directory/boot-data.json" << 'KIYOT_END'
@CELL_FILE@
KIYOT_END
cat > "$directory/ca.pem" << 'KIYOT_END'
@CA_PEM@
KIYOT_END

has() {
    command -v "$1" > /dev/null
}

if ! has containerd || ! has runc || ! has curl; then
    # Their services would start with the packages.
    for service in containerd docker; do ln -sf /dev/null "/etc/systemd/system/$service.service"; done
    systemctl daemon-reload
    if has apt-get; then
        export DEBIAN_FRONTEND=noninteractive
        options="-o DPkg::Lock::Timeout=300 -o Acquire::Retries=5"
        # shellcheck disable=SC2086
        apt-get $options -qq update
        # shellcheck disable=SC2086
        apt-get $options -qq -y install --no-install-recommends containerd runc curl ca-certificates
    elif has dnf; then
        # The image has curl, from the package curl-minimal.
        dnf -q -y install containerd runc
    else
        yum -q -y install containerd runc
    fi
fi

tries=0
# The token must not be in the arguments, which every process can read.
until curl --fail --silent --show-error --max-time 600 --max-filesize @AGENT_BYTES@ --cacert "$directory/ca.pem" \
    --resolve 'gateway.kiyot.internal:@PORT@:@ADDRESS@' --config - --output "$program" \
    'https://gateway.kiyot.internal:@PORT@/agent' << 'KIYOT_END'
user = "@CELL@:@TOKEN@"
KIYOT_END
do
    tries=$((tries + 1))
    [ "$tries" -lt 60 ] || exit 1
    sleep 5
done
rm "$directory/ca.pem"
echo "@AGENT_SHA256@  $program" | sha256sum --check --quiet
chmod 755 "$program"

cat > /etc/systemd/system/kiyot-cell.service << 'KIYOT_END'
@UNIT@
KIYOT_END
chmod 644 /etc/systemd/system/kiyot-cell.service
systemctl daemon-reload
systemctl enable --now kiyot-cell
