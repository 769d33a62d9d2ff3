#!/usr/bin/env bash
# Checks for programs that some tests run: chromium, curl, docker-registry, ip, prometheus, promtool, redis-server. Example:
#   scripts/system-tools.sh prometheus chromium
# As root on Debian or Ubuntu it installs missing ones.
set -euo pipefail

declare -A package_of=(
  [chromium]=chromium [curl]=curl [docker-registry]=docker-registry [ip]=iproute2 [prometheus]=prometheus
  [promtool]=prometheus [redis-server]=redis-server
)

missing=()
for tool in "$@"; do
  package=${package_of[$tool]:-}
  [ -n "$package" ] || { echo "system-tools: expected one of ${!package_of[*]}, got '$tool'" >&2; exit 2; }
  command -v "$tool" >/dev/null || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "system-tools: missing packages: ${missing[*]}; install them and run this again" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# Without recommended packages: those of Debian's prometheus include the node exporter, which would run as a service.
install() { apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null; }
install || { apt-get update -qq && install; }
