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
filled() { python -c 'import os, sys; sys.stdout.write(os.path.expandvars(sys.stdin.read()))' <"$1"; }
cp /etc/tandem/cluster.yaml /tmp/tandem/applied
filled /tmp/tandem/applied >/tmp/tandem/cluster.yaml

# The kubelet brings a changed ConfigMap into this pod. What can change live is then applied; anything else makes a new
# pod. Tried again for as long as the cluster starts.
follow() {
  local said="" result
  while sleep 5 && kill -0 $$; do
    cmp -s /etc/tandem/cluster.yaml /tmp/tandem/applied && continue
    cp /etc/tandem/cluster.yaml /tmp/tandem/next && filled /tmp/tandem/next >/tmp/tandem/next.yaml || continue
    if result=$(tandem apply /tmp/tandem/next.yaml 2>&1); then
      mv /tmp/tandem/next /tmp/tandem/applied
      echo "changed spec: $result"
      said=""
    elif [[ $result != "$said" ]]; then
      echo "changed spec not applied: $result" >&2
      said=$result
    fi
  done
}
follow &
exec tandem up --config /tmp/tandem/cluster.yaml
