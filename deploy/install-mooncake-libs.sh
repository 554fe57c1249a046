#!/usr/bin/env bash
# The Debian libraries that Mooncake's client and servers load (RDMA, NUMA, io_uring), for the connector `mooncake`.
# Does nothing when they are there; needs root otherwise.
set -euo pipefail

packages=(libibverbs1 libnuma1 liburing2 librdmacm1 libnl-3-200 libnl-route-3-200)

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ "$status" == installed ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi
if ((EUID != 0)); then
  echo "Mooncake needs ${missing[*]}: run this script as root, or install them some other way" >&2
  exit 1
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq -o Acquire::Retries=3
apt-get install -y -qq -o Acquire::Retries=3 --no-install-recommends "${missing[@]}" >/dev/null
