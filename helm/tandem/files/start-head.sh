# Runs Ray's head in the background and Tandem in the foreground; the pod ends when either does. SIGINT (the image's
# STOPSIGNAL) ends Tandem cleanly. A background job would not get it, because shells start those with SIGINT ignored.
set -euo pipefail
umask 077
ulimit -n 65536 || true
trap 'exit 1' INT TERM
(
  eval "$KUBERAY_GEN_RAY_START_CMD" || true
  echo "ray start ended; stopping Tandem" >&2
  kill -INT $$
) &
export RAY_ADDRESS="$POD_IP:6379"  # KubeRay sets 127.0.0.1, where nothing may listen
until ray health-check --address "$RAY_ADDRESS" >/dev/null 2>&1; do sleep 1; done
mkdir -p /tmp/tandem
python -c 'import os, sys; sys.stdout.write(os.path.expandvars(sys.stdin.read()))' \
  < /etc/tandem/cluster.yaml > /tmp/tandem/cluster.yaml
exec tandem up --config /tmp/tandem/cluster.yaml
