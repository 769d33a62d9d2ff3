#!/usr/bin/env bash
# Makes sure that programs of the distribution that some tests drive are here: chromium, curl, ip, prometheus,
# promtool, redis-server.
# `scripts/system-tools.sh prometheus chromium` looks for these two. As root on Debian or Ubuntu it installs what is missing.
set -euo pipefail

declare -A package_of=(
  [chromium]=chromium [curl]=curl [ip]=iproute2 [prometheus]=prometheus [promtool]=prometheus [redis-server]=redis-server
)

missing=()
for tool in "$@"; do
  package=${package_of[$tool]:-}
  [ -n "$package" ] || { echo "system-tools: expected one of ${!package_of[*]}, got '$tool'" >&2; exit 2; }
  command -v "$tool" >/dev/null || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "system-tools: not found: ${missing[*]}; install these packages and run this again" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# Without recommendations Debian's prometheus brings no node exporter; its service is not wanted either.
install() { apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null; }
install || { apt-get update -qq && install; }
