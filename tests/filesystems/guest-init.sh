#!/bin/sh
# The first process of a User Mode Linux guest (tests/filesystems/guests.py). The kernel hands its own parameters over as
# variables: GUEST_NAME, GUEST_ADDRESS, and EXCHANGE, a directory that the guest shares with the machine around it.
# The guest's root is the machine's, read-only; what has to be written is in memory.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mountpoint -q /dev || mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
for place in /dev/shm /run /tmp /var/tmp /mnt /var/lib/nfs; do
    mount -t tmpfs tmpfs "$place"
done

# Modules are not where modprobe looks for them. The kernel calls it by itself, too.
mkdir -p /run/modules/lib
ln -s /usr/lib/uml/modules /run/modules/lib/modules
printf '#!/bin/sh\nexec /sbin/modprobe --dirname /run/modules "$@"\n' >/run/modprobe
chmod +x /run/modprobe
echo /run/modprobe >/proc/sys/kernel/modprobe

mkdir -p /run/sshd /run/rpcbind /var/lib/nfs/sm /var/lib/nfs/sm.bak /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs
mkdir -p /mnt/shared /mnt/exported
touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state

mkdir -p "$EXCHANGE"
mount -t hostfs -o "$EXCHANGE" none "$EXCHANGE"
mount --bind "$EXCHANGE/hosts" /etc/hosts
mount --bind "$EXCHANGE/nsswitch.conf" /etc/nsswitch.conf

hostname "$GUEST_NAME"
ip link set lo up
ip addr add "$GUEST_ADDRESS/24" dev eth0
ip link set eth0 up

/usr/sbin/sshd -f "$EXCHANGE/guests/sshd_config"
touch "$EXCHANGE/guests/up-$GUEST_NAME"
while :; do
    sleep 1000
done
