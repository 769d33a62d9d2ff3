{{- /* What the schema of `cluster` cannot say: rules of the cluster spec between several keys. `tandem up` refuses the same in the
head (tandem/config/), but then the pods have been replaced. Renders nothing. */ -}}
{{- define "tandem.checkSpec" -}}
{{- $spec := include "tandem.clusterSpec" . | fromYaml -}}
{{- include "tandem.checkModels" $spec -}}
{{- include "tandem.checkAuth" (dig "security" "auth" dict $spec) -}}
{{- if and (eq (dig "security" "auth" "audit_log" "" $spec) "stdout") (ne $spec.observability.logs.target "stdout") -}}
{{- fail (printf "cluster.security.auth.audit_log: expected a file, or stdout with cluster.observability.logs.target: stdout, got a target of %s" $spec.observability.logs.target) -}}
{{- end -}}
{{- $tracing := dig "observability" "tracing" dict $spec -}}
{{- if not (kindIs "invalid" $tracing.tls) -}}
{{- if not (hasPrefix "https://" ($tracing.otlp_endpoint | default "")) -}}
{{- fail (printf "cluster.observability.tracing.tls: expected an https:// otlp_endpoint, got %s" ($tracing.otlp_endpoint | default "none")) -}}
{{- end -}}
{{- if ne (empty $tracing.tls.cert) (empty $tracing.tls.key) -}}
{{- fail "cluster.observability.tracing.tls.key: expected together with tls.cert" -}}
{{- end -}}
{{- end -}}
{{- $classes := dig "router" "classes" list $spec | default list -}}
{{- $names := list -}}{{- $hasObjective := empty $classes -}}
{{- range $index, $class := $classes -}}
{{- if has .name $names }}{{ fail (printf "cluster.router.classes[%d].name: expected different names, got %s again" $index .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- if and (not .batch) (or .ttft_slo_s .tpot_slo_s) }}{{ $hasObjective = true }}{{ end -}}
{{- end -}}
{{- with $spec.autoscaler -}}
{{- if and .enabled (not $hasObjective) -}}
{{- fail "cluster.autoscaler.enabled: expected a class in cluster.router.classes with batch false and with ttft_slo_s or tpot_slo_s, the objectives of the autoscaler" -}}
{{- end -}}
{{- include "tandem.checkLimits" . -}}
{{- end -}}
{{- if not (kindIs "invalid" $spec.control.devices) -}}
{{- fail "cluster.control.devices: expected none: the device plugin chooses the GPUs of a pod" -}}
{{- end -}}
{{- end -}}

{{- /* Args: (field of an engine, its values). */ -}}
{{- define "tandem.windowRefused" -}}
{{- printf "%s.batching_window_s: expected none with batching continuous, which collects no requests, got %v: remove it, or set batching to static or dynamic" (first .) (last .).batching_window_s -}}
{{- end -}}

{{- define "tandem.checkModels" -}}
{{- $names := list -}}
{{- range $index, $model := .models -}}
{{- $name := include "tandem.servedName" $model -}}
{{- if has $name $names }}{{ fail (printf "cluster.models[%d].name: expected a name that no other model has, got %s" $index $name) }}{{ end -}}
{{- $names = append $names $name -}}
{{- if eq (dig "decode" "workers" 1 $model | int) 0 -}}
{{- fail (printf "cluster.models[%d].decode.workers: expected at least 1 (zero prefill workers make the cluster aggregated)" $index) -}}
{{- end -}}
{{- with default dict $model.engine -}}
{{- if and (eq (default "continuous" .batching) "continuous") (not (kindIs "invalid" .batching_window_s)) -}}
{{- fail (include "tandem.windowRefused" (list (printf "cluster.models[%d].engine" $index) .)) -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := default dict (get $model $role) -}}
{{- $engine := mergeOverwrite (deepCopy (default dict $model.engine)) (deepCopy (default dict $pool.engine)) -}}
{{- $device := default "cpu" $engine.device -}}
{{- $of := printf "cluster.models[%d].%s" $index (ternary (print $role ".engine") "engine" (hasKey (default dict $pool.engine) "device")) -}}
{{- if contains ":" $device -}}
{{- fail (printf "%s.device: expected cuda: Ray chooses the GPU of a rank, got %s" $of $device) -}}
{{- end -}}
{{- if and (eq $device "cpu") (lt (default 1.0 $engine.device_share | float64) 1.0) -}}
{{- fail (printf "%s.device_share: expected 1 with device cpu, whose memory is limited by kv_memory_bytes, got %v" $of $engine.device_share) -}}
{{- end -}}
{{- $batching := default "continuous" $engine.batching -}}
{{- $field := printf "cluster.models[%d].%s" $index (ternary (print $role ".engine") "engine" (hasKey (default dict $pool.engine) "batching")) -}}
{{- if and (ne $batching "continuous") (gt (dig "prefill" "workers" 1 $model | int) 0) -}}
{{- fail (printf "%s.batching: expected continuous with prefill workers, got %s: a batch has the prompts and the answers of one engine. Set prefill.workers: 0" $field $batching) -}}
{{- end -}}
{{- if and (eq $batching "continuous") (not (kindIs "invalid" $engine.batching_window_s)) -}}
{{- fail (include "tandem.windowRefused" (list (printf "cluster.models[%d].%s.engine" $index $role) $engine)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.checkAuth" -}}
{{- $means := or .keys_file .api_key_sha256 .jwt -}}
{{- if and (eq (default "" .mode) "required") (not $means) -}}
{{- fail "cluster.security.auth.mode: expected auth.existingSecret, cluster.security.auth.api_key_sha256 or cluster.security.auth.jwt with mode required" -}}
{{- end -}}
{{- if and (eq (default "" .mode) "none") $means -}}
{{- fail "cluster.security.auth.mode: expected required (or unset) with auth.existingSecret, api_key_sha256 or jwt, got none" -}}
{{- end -}}
{{- with .jwt -}}
{{- if eq (empty .jwks_file) (empty .jwks_url) -}}
{{- fail "cluster.security.auth.jwt.jwks_file: expected exactly one of jwks_file and jwks_url" -}}
{{- end -}}
{{- if not (regexMatch "^(https://|http://(localhost|127\\.[0-9.]+|\\[::1\\])([:/]|$)|$)" (.jwks_url | default "")) -}}
{{- fail (printf "cluster.security.auth.jwt.jwks_url: expected an https URL (http only on loopback), got %s" .jwks_url) -}}
{{- end -}}
{{- end -}}
{{- $log := default "none" .audit_log -}}
{{- $auth := . -}}
{{- range $key := list "audit_lossless" "audit_chained" -}}
{{- if and (get $auth $key) (has $log (list "none" "stdout")) -}}
{{- fail (printf "cluster.security.auth.%s: expected a file as cluster.security.auth.audit_log, got %s" $key $log) -}}
{{- end -}}
{{- end -}}
{{- if and .audit_key_file (not .audit_chained) -}}
{{- fail "cluster.security.auth.audit_key_file: expected together with cluster.security.auth.audit_chained" -}}
{{- end -}}
{{- end -}}

{{- /* The autoscaler's limits, of both roles together and of each. */ -}}
{{- define "tandem.checkLimits" -}}
{{- $least := 0 -}}
{{- range $role, $unset := dict "prefill" 0 "decode" 1 -}}
{{- $limits := get $ $role | default dict -}}
{{- range $key := list "min" "max" }}{{ if and (eq $role "decode") (eq (toString (get $limits $key)) "0") -}}
{{- fail (printf "cluster.autoscaler.decode.%s: expected at least 1, got 0" $key) -}}
{{- end }}{{ end -}}
{{- if and (not (kindIs "invalid" $limits.min)) (not (kindIs "invalid" $limits.max)) }}{{ if gt (int $limits.min) (int $limits.max) -}}
{{- fail (printf "cluster.autoscaler.%s.max: expected at least min (%v), got %v" $role $limits.min $limits.max) -}}
{{- end }}{{ end -}}
{{- $least = add $least (ternary $unset ($limits.min | default $unset) (kindIs "invalid" $limits.min) | int) -}}
{{- end -}}
{{- with .max_workers -}}
{{- if gt (int ($.min_workers | default 0)) (int .) -}}
{{- fail (printf "cluster.autoscaler.max_workers: expected at least min_workers (%v), got %v" $.min_workers .) -}}
{{- end -}}
{{- if gt (int $least) (int .) -}}
{{- fail (printf "cluster.autoscaler.max_workers: expected at least prefill.min + decode.min (%d), got %v" (int $least) .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
