#!/usr/bin/env bash
# Builds what `sandboxd --machine firecracker` boots, from Debian's packages:
#
#   vmlinux      Debian's cloud kernel, unpacked
#   initrd.img   loads the modules that kernel needs and hands over to the root
#   rootfs.ext4  the desktop's programs and sandboxd as the first process; read-only
#
# usage: build.sh [--kernel FILE] OUT_DIR
#   --kernel FILE  an uncompressed kernel with virtio_mmio, virtio_blk, virtio_vsock
#                  and ext4 built in, such as those of Firecracker's CI; no initrd then
#
# Environment: SUITE (bookworm), MIRROR (Debian's, with its security updates), SIZE_MIB of
# the root file system (0: as large as its files and a tenth), GO (go),
# SOURCE_DATE_EPOCH (of all files). Needs root.
set -euo pipefail

die() {
  echo "build.sh: $*" >&2
  exit 1
}

kernel=
while [ $# -gt 0 ]; do
  case $1 in
    --kernel) [ $# -ge 2 ] || die "--kernel wants a file"; kernel=$(realpath -e "$2") || die "no kernel at $2"; shift 2 ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" | sed '$d'; exit 0 ;;
    -*) die "unknown option $1; see build.sh --help" ;;
    *) break ;;
  esac
done
[ $# -eq 1 ] || die "want one argument, the directory to write to; see build.sh --help"
[ "$(id -u)" -eq 0 ] || die "wants root, to make a root file system; run it with sudo"
[ "$(uname -m)" = x86_64 ] || die "builds for x86_64 only"

SUITE=${SUITE:-bookworm} MIRROR=${MIRROR:-} SIZE_MIB=${SIZE_MIB:-0} GO=${GO:-go}
source=$(realpath "$(dirname "$0")/../..")
missing=()
for pair in mmdebstrap:mmdebstrap mkfs.ext4:e2fsprogs cpio:cpio gzip:gzip lz4:lz4 xz:xz-utils zstd:zstd depmod:kmod; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
done
[ ${#missing[@]} -eq 0 ] || die "missing: apt-get install --no-install-recommends ${missing[*]}"
command -v "$GO" >/dev/null || die "missing: Go, to build sandboxd; name it with GO="

mkdir -p "$1"
out=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$source" log -1 --format=%ct 2>/dev/null || date +%s)}

echo "== sandboxd, which is also the guest's first process"
CGO_ENABLED=0 "$GO" build -C "$source" -trimpath -o "$work/berth-guest" ./cmd/sandboxd

# The list of desktop.Missing, a shell's tools, and what makes pages look right.
packages=(xvfb x11-xkb-utils openbox xterm l3afpad pcmanfm x11vnc chromium fonts-dejavu-core ca-certificates procps)
[ -n "$kernel" ] || packages+=(linux-image-cloud-amd64 busybox-static)
echo "== root file system: $SUITE and ${packages[*]}"
mmdebstrap --mode=root --variant=essential --format=directory \
  --aptopt='Apt::Install-Recommends "false"' --aptopt='Dpkg::Use-Pty "false"' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --include="$(IFS=,; echo "${packages[*]}")" "$SUITE" "$root" ${MIRROR:+"$MIRROR"}

if [ -z "$kernel" ]; then
  echo "== kernel"
  vmlinuz=$(echo "$root"/boot/vmlinuz-*)
  [ -f "$vmlinuz" ] || die "want one kernel in the packages, got: $vmlinuz"
  version=${vmlinuz##*/vmlinuz-}
  # Where a bzImage has the compressed kernel is in its setup header
  # (Documentation/arch/x86/boot.rst): setup_sects, payload_offset, payload_length.
  # The last four bytes of the payload are the size of the unpacked kernel.
  number() { od -An -t "u$2" -j "$1" -N "$2" "$vmlinuz" | tr -d ' '; }
  sectors=$(number $((0x1f1)) 1)
  start=$(((${sectors/#0/4} + 1) * 512 + $(number $((0x248)) 4)))
  length=$(($(number $((0x24c)) 4) - 4))
  dd if="$vmlinuz" of="$work/payload" iflag=skip_bytes,count_bytes skip="$start" count="$length" bs=1M status=none
  case $(od -An -t x1 -N 4 "$work/payload" | tr -d ' ') in
    02214c18) unpack=lz4 ;;
    1f8b*) unpack=gzip ;;
    fd377a58) unpack=xz ;;
    28b52ffd) unpack=zstd ;;
    *) die "$vmlinuz is packed in a way that is not known here" ;;
  esac
  "$unpack" -dcq <"$work/payload" >"$out/vmlinux" || die "$vmlinuz does not unpack with $unpack"
  [ "$(head -c 4 "$out/vmlinux" | tail -c 3)" = ELF ] || die "what $vmlinuz unpacks to is no kernel"

  echo "== initial RAM disk for $version"
  ram=$work/ram
  mkdir -p "$ram"/{bin,dev,lib/modules,proc,root,sys}
  cp "$root/bin/busybox" "$ram/bin/busybox"
  # In this order, with what each depends on before it.
  while read -r word path _; do
    if [ "$word" = insmod ]; then
      cp -n "$path" "$ram/lib/modules/"
      basename "$path"
    fi
  done < <(for module in virtio_mmio virtio_blk virtio_rng vmw_vsock_virtio_transport; do
    chroot "$root" /sbin/modprobe --show-depends --set-version "$version" "$module" | sed "s|insmod /|insmod $root/|"
  done | awk '!seen[$2]++') >"$ram/lib/modules/order"
  for needed in virtio_mmio virtio_blk vmw_vsock_virtio_transport; do
    grep -q "^$needed.ko" "$ram/lib/modules/order" || die "the kernel has no module $needed"
  done
  cat >"$ram/init" <<'INIT'
#!/bin/busybox sh
# Loads what the kernel has as modules, mounts the root drive and goes on there.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t devtmpfs dev /dev
while read -r module; do
  $b insmod "/lib/modules/$module" || echo "init: $module does not load"
done </lib/modules/order
n=0
while [ ! -b /dev/vda ] && [ $n -lt 100 ]; do
  n=$((n + 1))
  $b sleep 0.02
done
$b mount -t ext4 -o ro /dev/vda /root || {
  echo "init: the root drive does not mount"
  $b reboot -f
}
$b umount /proc
$b mount -o move /dev /root/dev
exec $b switch_root /root /usr/sbin/berth-guest
INIT
  chmod 0755 "$ram/init"
  (cd "$ram" && find . -print0 | sort -z | cpio --null --quiet -o -H newc --reproducible | gzip -9n >"$out/initrd.img")
  rm -rf "${root:?}/boot" "$root/usr/lib/modules" "$root/lib/modules"
else
  cp "$kernel" "$out/vmlinux"
  rm -f "$out/initrd.img"
fi

echo "== users, first process, places that tmpfs goes on"
install -m 0755 "$work/berth-guest" "$root/usr/sbin/berth-guest"
# As package jail has them.
chroot "$root" useradd --system --no-create-home --home-dir /nonexistent --shell /bin/false --uid 900 xserver
chroot "$root" useradd --no-create-home --home-dir /home/user --shell /bin/bash --uid 1000 user
mkdir -p "$root"/{home/user,proc,sys,dev,run,tmp,var/tmp}
echo sandbox >"$root/etc/hostname"
echo "127.0.0.1 localhost sandbox" >"$root/etc/hosts"
echo 00000000000000000000000000000001 >"$root/etc/machine-id" # the same in all: it tells nobody apart
: >"$root/etc/resolv.conf"
chroot "$root" fc-cache -f >/dev/null 2>&1 || true # a cache: it is made in memory where there is none
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/tmp/* "$root"/etc/ssh/ssh_host_*

echo "== $out/rootfs.ext4"
if [ "$SIZE_MIB" -eq 0 ]; then
  SIZE_MIB=$(($(du -sm --apparent-size "$root" | cut -f1) * 11 / 10 + 64))
fi
rm -f "$out/rootfs.ext4.new"
mkfs.ext4 -q -F -d "$root" -L berth -O ^has_journal -m 0 -E root_owner=0:0 "$out/rootfs.ext4.new" "${SIZE_MIB}M"
mv "$out/rootfs.ext4.new" "$out/rootfs.ext4" # microVMs that run keep the one they have
ls -lh "$out"
