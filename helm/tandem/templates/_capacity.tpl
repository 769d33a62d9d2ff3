{{- /* Checks before anything is applied that the pods have room for the spec's ranks. */ -}}

{{- /* A Kubernetes quantity in its base unit (bytes, cores), as text: 1.5Gi is 1610612736, 500m is 0.5. */ -}}
{{- define "tandem.quantity" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $factors := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- if not (hasKey $factors $unit) }}{{ fail (printf "expected a quantity such as 512Mi or 8Gi, got %q" $text) }}{{ end -}}
{{- printf "%.3f" (mulf (float64 $number) (get $factors $unit)) -}}
{{- end -}}

{{- /* Bytes of /dev/shm: Ray's object store with headroom, and segments of the GPU collectives. KV pools are not there: they
are anonymous memory files, or GPU memory. */ -}}
{{- define "tandem.neededSharedBytes" -}}
{{- add (mul 256 1048576) (mul 64 1048576 (.Values.node.gpus | int)) -}}
{{- end -}}

{{- define "tandem.sharedMemory" -}}
{{- if .Values.node.sharedMemory -}}
{{- $given := include "tandem.quantity" .Values.node.sharedMemory | float64 -}}
{{- $needed := include "tandem.neededSharedBytes" . | float64 -}}
{{- if lt $given $needed -}}
{{- fail (printf "node.sharedMemory: expected at least %.0fMi (Ray's object store, 64Mi for each GPU), got %s" (divf $needed 1048576) .Values.node.sharedMemory) -}}
{{- end -}}
{{- .Values.node.sharedMemory -}}
{{- else -}}
{{- printf "%.0fMi" (divf (include "tandem.neededSharedBytes" . | float64) 1048576) -}}
{{- end -}}
{{- end -}}

{{- /* Fails and names the value if a rank has no room. Renders nothing. */ -}}
{{- define "tandem.checkCapacity" -}}
{{- $nodes := add (.Values.node.replicas | int) (ternary 1 0 .Values.node.onHead) -}}
{{- if not $nodes }}{{ fail "node.replicas: expected at least 1 if node.onHead is false: there would be no workers" }}{{ end -}}
{{- if and (eq .Values.redis.mode "embedded") (eq (include "tandem.severalPods" .) "true") -}}
{{- fail "redis.mode: expected valkey or external with several pods: only the head pod can reach the embedded Redis" -}}
{{- end -}}
{{- if lt (.Values.node.maxReplicas | int) (.Values.node.replicas | int) -}}
{{- fail (printf "node.maxReplicas: expected at least node.replicas (%v), got %v" .Values.node.replicas .Values.node.maxReplicas) -}}
{{- end -}}
{{- if gt (.Values.node.minReplicas | int) (.Values.node.replicas | int) -}}
{{- fail (printf "node.minReplicas: expected at most node.replicas (%v), got %v" .Values.node.replicas .Values.node.minReplicas) -}}
{{- end -}}
{{- $need := dict "cpus" 0.0 "gpus" 0.0 "wide" 0 "pools" 0.0 "ranks" list "workers" list -}}
{{- range $index, $model := .Values.cluster.models -}}
{{- include "tandem.addModel" (list $ $index $model $need) -}}
{{- end -}}
{{- $requests := default dict .Values.node.resources.requests -}}
{{- $limits := default dict .Values.node.resources.limits -}}
{{- with default (get $requests "cpu") (get $limits "cpu") -}}
{{- $cpus := mulf (include "tandem.quantity" . | float64) (float64 $nodes) -}}
{{- if lt $cpus $need.cpus -}}
{{- fail (printf "node.resources.requests.cpu: expected %v or more over %v (ranks × engine.threads_per_rank), got %v" $need.cpus (include "tandem.nodes" $nodes) $cpus) -}}
{{- end -}}
{{- end -}}
{{- $gpus := mul (.Values.node.gpus | int) $nodes -}}
{{- $wanted := max (ceil $need.gpus | int) $need.wide -}}
{{- if gt $wanted (int $gpus) -}}
{{- fail (printf "node.gpus: expected %v or more over %v (engine.device_share of a GPU for each rank, workers × tp: %s), got %v" $wanted (include "tandem.nodes" $nodes) (join ", " $need.ranks) $gpus) -}}
{{- end -}}
{{- include "tandem.checkPacking" (list . $nodes $need.workers) -}}
{{- include "tandem.checkAutoscaler" . -}}
{{- with get $limits "memory" -}}
{{- $memory := include "tandem.quantity" . | float64 -}}
{{- $shared := include "tandem.quantity" (include "tandem.sharedMemory" $) | float64 -}}
{{- if lt (mulf $memory (float64 $nodes)) (addf $need.pools (mulf $shared (float64 $nodes))) -}}
{{- fail (printf "node.resources.limits.memory: expected more than %.0fMi over %v for KV pools (engine.kv_memory_bytes of each rank), host tiers and /dev/shm, got %s each" (divf (addf $need.pools (mulf $shared (float64 $nodes))) 1048576) (include "tandem.nodes" $nodes) .) -}}
{{- end -}}
{{- end -}}
{{- if and (include "tandem.internalSecret" (list . "head")) (eq .Values.redis.mode "valkey") (not .Values.redis.valkey.tls.existingSecret) -}}
{{- fail "redis.valkey.tls.existingSecret: expected a Secret, because tls.internal is set and prefix events would be sent unencrypted" -}}
{{- end -}}
{{- $drain := dig "router" "drain_timeout_s" 3 .Values.cluster | float64 -}}
{{- $ending := addf $drain (float64 .Values.preStopSeconds) 10.0 -}}
{{- if lt (float64 .Values.terminationGracePeriodSeconds) $ending -}}
{{- fail (printf "terminationGracePeriodSeconds: expected at least %v (preStopSeconds + cluster.router.drain_timeout_s + 10 to stop), got %v" $ending .Values.terminationGracePeriodSeconds) -}}
{{- end -}}
{{- with .Values.routers.terminationGracePeriodSeconds -}}
{{- if lt (float64 .) $ending -}}
{{- fail (printf "routers.terminationGracePeriodSeconds: expected 0 (as the other pods) or at least %v (preStopSeconds + cluster.router.drain_timeout_s + 10 to stop), got %v" $ending .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Places workers that need whole GPUs on nodes, the widest first, as their ranks share a node. Fails at the first one that
no node has room for. With three widths or more a better order may exist; Ray does not look for one either. */ -}}
{{- define "tandem.checkPacking" -}}
{{- $root := index . 0 -}}{{- $nodes := index . 1 | int -}}{{- $workers := index . 2 -}}
{{- $each := $root.Values.node.gpus | int -}}
{{- $free := dict -}}
{{- range $node := until $nodes }}{{ $_ := set $free (toString $node) $each }}{{ end -}}
{{- range $width := untilStep $each 0 -1 -}}
{{- range $worker := $workers -}}
{{- if eq (int $worker.gpus) $width -}}
{{- $found := "" -}}
{{- range $node := until $nodes -}}
{{- if and (not $found) (ge (get $free (toString $node) | int) $width) }}{{ $found = toString $node }}{{ end -}}
{{- end -}}
{{- if not $found -}}
{{- fail (printf "node.gpus: %s has a worker of %d GPUs that fits on no node: the ranks of a worker share a node, and what is left of %s of %d GPUs is less on each; add a node, or choose tp so that workers fill nodes" $worker.name $width (include "tandem.nodes" $nodes) $each) -}}
{{- end -}}
{{- $_ := set $free $found (sub (get $free $found | int) $width) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The autoscaler's limits must have room on the most nodes there may be. */ -}}
{{- define "tandem.checkAutoscaler" -}}
{{- $scaler := default dict .Values.cluster.autoscaler -}}
{{- if and $scaler.enabled $scaler.max_workers -}}
{{- $nodes := add (max (.Values.node.maxReplicas | int) (.Values.node.replicas | int)) (ternary 1 0 .Values.node.onHead) | int -}}
{{- if and .Values.node.onHead (not (.Values.node.replicas | int)) }}{{ $nodes = 1 }}{{ end -}}
{{- $least := 0.0 -}}
{{- range $index, $model := .Values.cluster.models -}}
{{- $narrow := -1.0 -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := default dict (get $model $role) -}}
{{- $engine := mergeOverwrite (deepCopy (default dict $model.engine)) (deepCopy (default dict $pool.engine)) -}}
{{- $gpus := mulf (float64 (ternary $pool.tp 1 (hasKey $pool "tp"))) (float64 (default 1.0 $engine.device_share)) -}}
{{- if not (hasPrefix "cuda" (default "cpu" $engine.device)) }}{{ $gpus = 0.0 }}{{ end -}}
{{- if or (lt $narrow 0.0) (lt $gpus $narrow) }}{{ $narrow = $gpus }}{{ end -}}
{{- end -}}
{{- $least = addf $least (mulf $narrow (float64 $scaler.max_workers)) -}}
{{- end -}}
{{- $gpus := mul (.Values.node.gpus | int) $nodes -}}
{{- if gt $least (float64 $gpus) -}}
{{- fail (printf "cluster.autoscaler.max_workers: expected at most what %s can hold (node.maxReplicas × node.gpus: %d GPUs), got %d workers of each model, which need at least %v; lower it, or raise node.maxReplicas" (include "tandem.nodes" $nodes) $gpus (int $scaler.max_workers) $least) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.nodes" -}}
{{- . }} node{{ ternary "" "s" (eq (int .) 1) -}}
{{- end -}}

{{- define "tandem.addModel" -}}
{{- $root := index . 0 -}}{{- $index := index . 1 -}}{{- $model := index . 2 -}}{{- $need := index . 3 -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := default dict (get $model $role) -}}
{{- $engine := mergeOverwrite (deepCopy (default dict $model.engine)) (deepCopy (default dict $pool.engine)) -}}
{{- $where := ternary (printf "%s.engine" $role) "engine" (hasKey (default dict $pool.engine) "device") -}}
{{- $cuda := hasPrefix "cuda" (default "cpu" $engine.device) -}}
{{- $share := default 1.0 $engine.device_share | float64 -}}
{{- $tp := ternary $pool.tp 1 (hasKey $pool "tp") | int -}}
{{- $ranks := mul (ternary $pool.workers 1 (hasKey $pool "workers") | int) $tp -}}
{{- if and $cuda $ranks (not $root.Values.node.gpus) -}}
{{- fail (printf "node.gpus: expected the GPUs of a node, because cluster.models[%d].%s.device is %s" $index $where $engine.device) -}}
{{- end -}}
{{- if and $cuda $ranks (gt $tp ($root.Values.node.gpus | int)) -}}
{{- fail (printf "cluster.models[%d].%s.tp: expected at most node.gpus (%v), because the ranks of a worker share a node; got %d" $index $role $root.Values.node.gpus $tp) -}}
{{- end -}}
{{- if and $cuda $ranks (gt $tp 1) (le $share 0.5) -}}
{{- fail (printf "cluster.models[%d].%s.tp: expected 1 with engine.device_share %v: Ray may place two shares of at most half a GPU on one GPU, and the ranks of a worker need different ones; got %d" $index $role $share $tp) -}}
{{- end -}}
{{- $_ := set $need "cpus" (addf $need.cpus (mulf (float64 $ranks) (float64 (default 1 $engine.threads_per_rank)))) -}}
{{- if $cuda -}}
{{- $_ := set $need "gpus" (addf $need.gpus (mulf (float64 $ranks) $share)) -}}
{{- if gt $share 0.5 }}{{ $_ := set $need "wide" (add $need.wide $ranks | int) }}{{ end -}}
{{- $gpus := ternary $tp 1 (gt $share 0.5) | int -}}
{{- range $_ := until (ternary (div $ranks $tp | int) 0 (gt $share 0.5)) -}}
{{- $_ := set $need "workers" (append $need.workers (dict "gpus" $gpus "name" (printf "cluster.models[%d].%s" $index $role))) -}}
{{- end -}}
{{- $_ := set $need "ranks" (append $need.ranks (printf "cluster.models[%d].%s %d × %d" $index $role (div $ranks $tp) $tp)) -}}
{{- else if not $engine.kv_blocks -}}
{{- $_ := set $need "pools" (addf $need.pools (mulf (float64 $ranks) (float64 (default 536870912 $engine.kv_memory_bytes)))) -}}
{{- end -}}
{{- $_ := set $need "pools" (addf $need.pools (mulf (float64 $ranks) (float64 (default 0 $engine.host_kv_memory_bytes)))) -}}
{{- end -}}
{{- end -}}
