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
{{- fail (printf "%s.sharedMemory: expected at least %.0fMi (Ray's object store, 64Mi for each GPU), got %s" (.Values.node.where | default "node") (divf $needed 1048576) .Values.node.sharedMemory) -}}
{{- end -}}
{{- .Values.node.sharedMemory -}}
{{- else -}}
{{- printf "%.0fMi" (divf (include "tandem.neededSharedBytes" . | float64) 1048576) -}}
{{- end -}}
{{- end -}}

{{- /* Fails and names the value if a rank has no room. Renders nothing. */ -}}
{{- define "tandem.checkCapacity" -}}
{{- $groups := include "tandem.usedGroups" . | fromJsonArray -}}
{{- if not $groups }}{{ fail "node.replicas: expected at least 1 if node.onHead is false: there would be no workers" }}{{ end -}}
{{- if and (eq .Values.redis.mode "embedded") (eq (include "tandem.severalPods" .) "true") -}}
{{- fail "redis.mode: expected valkey or external with several pods: only the head pod can reach the embedded Redis" -}}
{{- end -}}
{{- $grows := .Values.ray.autoscaling.enabled -}}
{{- $most := 0 -}}
{{- range $group := $groups -}}
{{- $most = add $most ($group.most | int) -}}
{{- if and $grows ($group.replicas | int) -}}
{{- fail (printf "%s.replicas: expected 0 with ray.autoscaling.enabled, which begins with %s.minReplicas, got %v; set that instead" $group.where $group.where $group.replicas) -}}
{{- end -}}
{{- if and $grows (gt ($group.minReplicas | int) ($group.maxReplicas | int)) -}}
{{- fail (printf "%s.minReplicas: expected at most %s.maxReplicas (%v), got %v" $group.where $group.where $group.maxReplicas $group.minReplicas) -}}
{{- end -}}
{{- if lt ($group.maxReplicas | int) ($group.replicas | int) -}}
{{- fail (printf "%s.maxReplicas: expected at least %s.replicas (%v), got %v" $group.where $group.where $group.replicas $group.maxReplicas) -}}
{{- end -}}
{{- if and (not $grows) (gt ($group.minReplicas | int) ($group.replicas | int)) -}}
{{- fail (printf "%s.minReplicas: expected at most %s.replicas (%v), got %v" $group.where $group.where $group.replicas $group.minReplicas) -}}
{{- end -}}
{{- end -}}
{{- if and $grows (not $most) -}}
{{- fail "ray.autoscaling.enabled: expected maxReplicas of node or of a group in nodeGroups: there would be no nodes" -}}
{{- end -}}
{{- $pools := list -}}
{{- range $index, $model := .Values.cluster.models -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pools = append $pools (include "tandem.poolNeeds" (list $ $groups $index $role) | fromJson) -}}
{{- end -}}
{{- include "tandem.checkColocation" (list $ $groups $index (slice $pools (sub (len $pools) 2 | int))) -}}
{{- end -}}
{{- /* For each set of groups that a pool may use: what the pools that may use nothing else need, and what the set has. */ -}}
{{- $all := list -}}
{{- range $groups }}{{ $all = append $all .name }}{{ end -}}
{{- $sets := list -}}
{{- range $pools }}{{ $sets = append $sets .groups }}{{ end -}}
{{- $sets = append $sets $all | uniq -}}
{{- range $set := $sets -}}
{{- include "tandem.checkSet" (list $ $groups $pools $set) -}}
{{- end -}}
{{- include "tandem.checkPacking" (list $groups $pools) -}}
{{- range $pools }}{{ include "tandem.checkWorkerMemory" (list $ $groups .) }}{{ end -}}
{{- include "tandem.checkAutoscaler" (list $ $groups) -}}
{{- if .Values.scaleAdapter.enabled }}{{ include "tandem.checkPoolAutoscalers" (list $ $groups) }}{{ end -}}
{{- if and (include "tandem.internalTls" .) (eq .Values.redis.mode "valkey") (not .Values.redis.valkey.tls.existingSecret) -}}
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

{{- /* What the workers of one pool need, as JSON: `groups` where they may be, `workers` and `ranks` as numbers, `gpus` of a
worker that needs whole ones (else 0), `cpus`, `shares` of GPUs and `bytes` of host memory in all, `workerBytes` of one worker, and how its `weights` are known. Args: (root, groups, index of the model,
role). */ -}}
{{- define "tandem.poolNeeds" -}}
{{- $root := index . 0 -}}{{- $groups := index . 1 -}}{{- $index := index . 2 -}}{{- $role := index . 3 -}}
{{- $model := index $root.Values.cluster.models $index -}}
{{- $pool := default dict (get $model $role) -}}
{{- $engine := mergeOverwrite (deepCopy (default dict $model.engine)) (deepCopy (default dict $pool.engine)) -}}
{{- $where := ternary (printf "%s.engine" $role) "engine" (hasKey (default dict $pool.engine) "device") -}}
{{- $cuda := hasPrefix "cuda" (default "cpu" $engine.device) -}}
{{- $share := ternary (default 1.0 $engine.device_share | float64) 0.0 $cuda -}}
{{- $tp := ternary $pool.tp 1 (hasKey $pool "tp") | int -}}
{{- $workers := include "tandem.poolWorkers" $pool | int -}}
{{- $allowed := include "tandem.groupsOf" (list $groups $role $pool.node_groups $index $workers) | fromJsonArray -}}
{{- $ranks := mul $workers $tp -}}
{{- $widest := 0 -}}
{{- range $groups }}{{ if has .name $allowed }}{{ $widest = max $widest (.gpus | int) }}{{ end }}{{ end -}}
{{- $of := include "tandem.setWhere" (list $groups $allowed) -}}
{{- if and $cuda $ranks (not $widest) -}}
{{- fail (printf "%s.gpus: expected the GPUs of a node, because cluster.models[%d].%s.device is %s" $of $index $where $engine.device) -}}
{{- end -}}
{{- if and $cuda $ranks (gt $tp $widest) -}}
{{- fail (printf "cluster.models[%d].%s.tp: expected at most %s.gpus (%v), because the ranks of a worker share a node; got %d" $index $role $of $widest $tp) -}}
{{- end -}}
{{- if and $cuda $ranks (gt $tp 1) (le $share 0.5) -}}
{{- fail (printf "cluster.models[%d].%s.tp: expected 1 with engine.device_share %v: Ray may place two shares of at most half a GPU on one GPU, and the ranks of a worker need different ones; got %d" $index $role $share $tp) -}}
{{- end -}}
{{- $bytes := float64 (default 0 $engine.host_kv_memory_bytes) -}}
{{- if not (or $cuda $engine.kv_blocks) }}{{ $bytes = addf $bytes (float64 (default 536870912 $engine.kv_memory_bytes)) }}{{ end -}}
{{- if not $cuda }}{{ $bytes = addf $bytes 367001600.0 }}{{ end -}}{{- /* A process: PROCESS_BYTES in cluster/spec/resolve.py. */ -}}
{{- $weights := include "tandem.weights" (list $root (default "smollm2-135m" $model.source)) | fromJson -}}
{{- $held := 0.0 -}}{{- /* GPUs have weights in memory of their own. */ -}}
{{- if not $cuda }}{{ $held = mulf $weights.parameters (get (dict "dense" (ternary 4.0 2.0 (eq (default "float32" $engine.dtype) "float32")) "int8" 1.0 "int4" 0.5) (default "dense" $engine.weights) | default 1.0) }}{{ end -}}
{{- $each := addf $held (mulf (float64 $tp) $bytes) -}}
{{- toJson (dict "name" (printf "cluster.models[%d].%s" $index $role) "groups" $allowed "workers" $workers "tp" $tp "ranks" $ranks
  "cuda" $cuda "gpus" (ternary $tp 0 (gt $share 0.5)) "cpus" (mulf (float64 $ranks) (float64 (default 1 $engine.threads_per_rank)))
  "shares" (mulf (float64 $ranks) $share) "workerBytes" $each "bytes" (mulf (float64 $workers) $each) "weights" (ternary $weights.how "" (gt $held 0.0))) -}}
{{- end -}}

{{- /* The value that a message about these groups names. Args: (groups, names). */ -}}
{{- define "tandem.setWhere" -}}
{{- $names := index . 1 -}}{{- $found := list -}}
{{- range index . 0 }}{{ if has .name $names }}{{ $found = append $found .where }}{{ end }}{{ end -}}
{{- join " and " $found -}}
{{- end -}}

{{- define "tandem.checkSet" -}}
{{- $root := index . 0 -}}{{- $set := index . 3 -}}
{{- $where := include "tandem.setWhere" (list (index . 1) $set) -}}
{{- $nodes := 0 -}}{{- $cpus := 0.0 -}}{{- $knowsCpus := true -}}{{- $gpus := 0 -}}{{- $memory := 0.0 -}}{{- $knowsMemory := true -}}{{- $bytes := 0.0 -}}
{{- $limits := list -}}
{{- range $group := index . 1 -}}
{{- if has $group.name $set -}}
{{- $pods := float64 $group.pods -}}
{{- $nodes = add $nodes ($group.pods | int) -}}
{{- $gpus = add $gpus (mul ($group.gpus | int) ($group.pods | int)) -}}
{{- $requests := default dict $group.resources.requests -}}
{{- $limit := default dict $group.resources.limits -}}
{{- with default (get $requests "cpu") (get $limit "cpu") }}{{ $cpus = addf $cpus (mulf (include "tandem.quantity" . | float64) $pods) }}{{ else }}{{ $knowsCpus = false }}{{ end -}}
{{- with get $limit "memory" -}}
{{- $memory = addf $memory (mulf (include "tandem.quantity" . | float64) $pods) -}}
{{- $limits = append $limits . -}}
{{- else }}{{ $knowsMemory = false }}{{ end -}}
{{- $context := set (omit $root "Values") "Values" (set (omit $root.Values "node") "node" $group) -}}
{{- $bytes = addf $bytes (mulf (include "tandem.quantity" (include "tandem.sharedMemory" $context) | float64) $pods) -}}
{{- end -}}
{{- end -}}
{{- $needed := dict "cpus" 0.0 "shares" 0.0 "whole" 0 "bytes" 0.0 -}}{{- $ranks := list -}}{{- $names := list -}}{{- $weights := list -}}
{{- range $pool := index . 2 -}}
{{- $inside := true -}}
{{- range $pool.groups }}{{ if not (has . $set) }}{{ $inside = false }}{{ end }}{{ end -}}
{{- if $inside -}}
{{- if $pool.ranks }}{{ $names = append $names $pool.name }}{{ end -}}
{{- with $pool.weights }}{{ $weights = append $weights . }}{{ end -}}
{{- range $key := list "cpus" "shares" "bytes" }}{{ $_ := set $needed $key (addf (get $needed $key) (get $pool $key)) }}{{ end -}}
{{- if $pool.gpus }}{{ $_ := set $needed "whole" (add $needed.whole ($pool.ranks | int)) }}{{ end -}}
{{- if $pool.cuda }}{{ $ranks = append $ranks (printf "%s %d × %d" $pool.name ($pool.workers | int) ($pool.tp | int)) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and $names (not $nodes) -}}
{{- fail (printf "%s.replicas: expected at least 1: workers of %s may be nowhere else" $where (join " and " $names)) -}}
{{- end -}}
{{- $over := include "tandem.nodes" $nodes -}}
{{- if and $knowsCpus (lt $cpus $needed.cpus) -}}
{{- fail (printf "%s.resources.requests.cpu: expected %v or more over %v (ranks × engine.threads_per_rank), got %v" $where $needed.cpus $over $cpus) -}}
{{- end -}}
{{- $wanted := max (ceil $needed.shares | int) ($needed.whole | int) -}}
{{- if gt $wanted (int $gpus) -}}
{{- fail (printf "%s.gpus: expected %v or more over %v (engine.device_share of a GPU for each rank, workers × tp: %s), got %v" $where $wanted $over (join ", " $ranks) $gpus) -}}
{{- end -}}
{{- if and $knowsMemory (lt $memory (addf $needed.bytes $bytes)) -}}
{{- fail (printf "%s.resources.limits.memory: expected more than %.0fMi over %v for %sKV pools (engine.kv_memory_bytes of each rank), host tiers, processes and /dev/shm, got %s each" $where (divf (addf $needed.bytes $bytes) 1048576) $over (include "tandem.weightsText" $weights) (join ", " (uniq $limits))) -}}
{{- end -}}
{{- end -}}

{{- /* The ranks of a worker share a node, so one node must have memory for all of them. Args: (root, groups, pool). */ -}}
{{- define "tandem.checkWorkerMemory" -}}
{{- $root := index . 0 -}}{{- $pool := index . 2 -}}
{{- $most := 0.0 -}}{{- $known := gt ($pool.workers | int) 0 -}}
{{- range $group := index . 1 -}}
{{- if has $group.name $pool.groups -}}
{{- $context := set (omit $root "Values") "Values" (set (omit $root.Values "node") "node" $group) -}}
{{- with dig "limits" "memory" "" (default dict $group.resources) -}}
{{- $most = maxf $most (subf (include "tandem.quantity" . | float64) (include "tandem.quantity" (include "tandem.sharedMemory" $context) | float64)) -}}
{{- else }}{{ $known = false }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and $known (gt $pool.workerBytes $most) -}}
{{- fail (printf "%s.resources.limits.memory: expected more than %s beside /dev/shm: a worker of %s has all its ranks on one node, with its %sKV pools and host tiers; got at most %s" (include "tandem.setWhere" (list (index . 1) $pool.groups)) (include "tandem.gigabytes" $pool.workerBytes) $pool.name (include "tandem.weightsText" (compact (list $pool.weights))) (include "tandem.gigabytes" $most)) -}}
{{- end -}}
{{- end -}}

{{- define "tandem.weightsText" -}}
{{- with uniq . }}weights ({{ join ", " . }}; if an estimate is wrong, say the size in models.weights), {{ end -}}
{{- end -}}

{{- /* Places workers that need whole GPUs on nodes, the widest first, and among them those with the fewest groups, as their ranks
share a node. Fails at the first one that no node has room for. With three widths or more a better order may exist; Ray does not
look for one either. Args: (groups, pools). */ -}}
{{- define "tandem.checkPacking" -}}
{{- $groups := index . 0 -}}
{{- $free := list -}}{{- $most := 0 -}}
{{- range $group := $groups -}}
{{- $most = max $most ($group.gpus | int) -}}
{{- range until ($group.pods | int) }}{{ $free = append $free (dict "group" $group.name "gpus" ($group.gpus | int)) }}{{ end -}}
{{- end -}}
{{- range $width := untilStep (int $most) 0 -1 -}}
{{- range $choices := untilStep 1 (add (len $groups) 1 | int) 1 -}}
{{- range $pool := index $ 1 -}}
{{- if and (eq ($pool.gpus | int) $width) (eq (len $pool.groups) $choices) -}}
{{- range until ($pool.workers | int) -}}
{{- $found := dict -}}
{{- range $node := $free -}}
{{- if and (not $found) (has $node.group $pool.groups) (ge $node.gpus $width) }}{{ $found = $node }}{{ end -}}
{{- end -}}
{{- if not $found -}}
{{- $nodes := list -}}
{{- range $groups }}{{ if has .name $pool.groups }}{{ $nodes = append $nodes (printf "%s of %d GPUs" (include "tandem.nodes" (.pods | int)) (.gpus | int)) }}{{ end }}{{ end -}}
{{- fail (printf "%s.gpus: %s has a worker of %d GPUs that fits on no node: the ranks of a worker share a node, and what is left of %s is less on each; add a node, or choose tp so that workers fill nodes" (include "tandem.setWhere" (list $groups $pool.groups)) $pool.name $width (join " and " $nodes)) -}}
{{- end -}}
{{- $_ := set $found "gpus" (sub $found.gpus $width | int) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* With colocate: require a node must have room for a worker of each role. Args: (root, groups, index of the model, its pools). */ -}}
{{- define "tandem.checkColocation" -}}
{{- $model := index (index . 0).Values.cluster.models (index . 2) -}}
{{- if eq (default "prefer" $model.colocate) "require" -}}
{{- if (index . 0).Values.ray.autoscaling.enabled -}}
{{- fail (printf "cluster.models[%d].colocate: expected prefer or no with ray.autoscaling.enabled: a worker that waits for a partner's machine asks for no new one; got require" (index . 2)) -}}
{{- end -}}
{{- $prefill := index . 3 | first -}}{{- $decode := index . 3 | last -}}
{{- if not ($prefill.workers | int) -}}
{{- fail (printf "cluster.models[%d].colocate: expected prefer or no with prefill.workers 0: there is no other role; got require" (index . 2)) -}}
{{- end -}}
{{- $both := add ($prefill.gpus | int) ($decode.gpus | int) -}}
{{- $most := -1 -}}
{{- range index . 1 }}{{ if and (has .name $prefill.groups) (has .name $decode.groups) }}{{ $most = max $most (.gpus | int) }}{{ end }}{{ end -}}
{{- if lt (int $most) 0 -}}
{{- fail (printf "cluster.models[%d].colocate: expected prefer or no: prefill and decode workers may be on no common node (%s and %s); got require" (index . 2) (join ", " $prefill.groups) (join ", " $decode.groups)) -}}
{{- end -}}
{{- if gt (int $both) (int $most) -}}
{{- fail (printf "cluster.models[%d].colocate: expected prefer or no: a prefill and a decode worker need %d GPUs of one node, and no node that both may be on has more than %d; got require" (index . 2) $both $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The GPUs of a worker, as text: 0.5 if two share one. Args: (model, role). */ -}}
{{- define "tandem.workerGpus" -}}
{{- $model := index . 0 -}}{{- $pool := default dict (get $model (index . 1)) -}}
{{- $engine := mergeOverwrite (deepCopy (default dict $model.engine)) (deepCopy (default dict $pool.engine)) -}}
{{- if hasPrefix "cuda" (default "cpu" $engine.device) -}}
{{- mulf (float64 (ternary $pool.tp 1 (hasKey $pool "tp"))) (float64 (default 1.0 $engine.device_share)) -}}
{{- else -}}
0
{{- end -}}
{{- end -}}

{{- /* Each autoscaler's maximum must have room on the most nodes there may be, with the other pools at their least: something
else may scale one that has none. Args: (root, groups). */ -}}
{{- define "tandem.checkPoolAutoscalers" -}}
{{- $root := index . 0 -}}{{- $scalers := include "tandem.poolAutoscalers" $root | fromJsonArray -}}
{{- $gpus := 0 -}}{{- $names := list -}}
{{- range index . 1 }}{{ $gpus = add $gpus (mul (.most | int) (.gpus | int)) }}{{ $names = append $names .where }}{{ end -}}
{{- $least := dict -}}
{{- range $pool := include "tandem.pools" $root | fromJsonArray -}}
{{- $model := index $root.Values.cluster.models ($pool.index | int) -}}
{{- $workers := ternary 0 1 (eq $pool.role "prefill") -}}
{{- range $scalers }}{{ if eq .pool $pool.name }}{{ $workers = .minReplicas | default 1 }}{{ end }}{{ end -}}
{{- $_ := set $least $pool.name (mulf (float64 $workers) (include "tandem.workerGpus" (list $model $pool.role) | float64)) -}}
{{- end -}}
{{- range $scaler := $scalers -}}
{{- $each := include "tandem.workerGpus" (list (index $root.Values.cluster.models ($scaler.index | int)) $scaler.role) | float64 -}}
{{- $others := 0.0 -}}
{{- range $name, $needed := $least }}{{ if ne $name $scaler.pool }}{{ $others = addf $others $needed }}{{ end }}{{ end -}}
{{- if gt (addf $others (mulf $each (float64 $scaler.maxReplicas))) (float64 $gpus) -}}
{{- fail (printf "%s.maxReplicas: expected at most what the nodes can hold (%d GPUs: maxReplicas × gpus of %s) beside the other pools' least (%v GPUs), got %d workers of %v GPUs; lower it, or raise maxReplicas of the nodes" $scaler.where $gpus (join " and " $names) $others ($scaler.maxReplicas | int) $each) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The autoscaler's limits must have room on the most nodes there may be. Args: (root, groups). */ -}}
{{- define "tandem.checkAutoscaler" -}}
{{- $root := index . 0 -}}{{- $names := list -}}
{{- range index . 1 }}{{ $names = append $names .where }}{{ end -}}
{{- $where := join " and " $names -}}
{{- $scaler := default dict $root.Values.cluster.autoscaler -}}
{{- if and $scaler.enabled $scaler.max_workers -}}
{{- $nodes := 0 -}}{{- $gpus := 0 -}}
{{- range $group := index . 1 -}}
{{- $nodes = add $nodes ($group.most | int) -}}
{{- $gpus = add $gpus (mul ($group.most | int) ($group.gpus | int)) -}}
{{- end -}}
{{- $least := 0.0 -}}
{{- range $index, $model := $root.Values.cluster.models -}}
{{- $narrow := -1.0 -}}
{{- range $role := list "prefill" "decode" -}}
{{- $each := include "tandem.workerGpus" (list $model $role) | float64 -}}
{{- if or (lt $narrow 0.0) (lt $each $narrow) }}{{ $narrow = $each }}{{ end -}}
{{- end -}}
{{- $least = addf $least (mulf $narrow (float64 $scaler.max_workers)) -}}
{{- end -}}
{{- if gt $least (float64 $gpus) -}}
{{- fail (printf "cluster.autoscaler.max_workers: expected at most what %s can hold (maxReplicas × gpus of %s: %d GPUs), got %d workers of each model, which need at least %v; lower it, or raise maxReplicas" (include "tandem.nodes" $nodes) $where $gpus (int $scaler.max_workers) $least) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.nodes" -}}
{{- . }} node{{ ternary "" "s" (eq (int .) 1) -}}
{{- end -}}

{{- /* Three quarters of Valkey's memory limit, so that it evicts keys before the kernel ends it. */ -}}
{{- define "tandem.valkeyMegabytes" -}}
{{- $limit := default dict .Values.redis.valkey.resources.limits | dig "memory" "" -}}
{{- if $limit }}{{ max 1 (floor (divf (mulf 0.75 (include "tandem.quantity" $limit | float64)) 1048576.0) | int) }}{{ else }}384{{ end -}}
{{- end -}}
