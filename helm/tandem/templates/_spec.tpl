{{- /* The cluster spec as the head reads it: the values plus the chart's own settings. The pod fills in ${…}. */ -}}
{{- define "tandem.clusterSpec" -}}
{{- $spec := deepCopy .Values.cluster -}}
{{- if hasKey $spec "redis" }}{{ fail "cluster.redis: set by the chart; use the chart's own redis values" }}{{ end -}}
{{- $setByChart := dict
  "router.http_host" "" "router.http_port" "" "router.grpc_host" "" "router.grpc_port" ""
  "router.tls" "; use tls.edge" "security.tls" "; use tls.internal" "security.auth.keys_file" "; use auth.existingSecret"
  "transfer.bind_host" "" "transfer.tls" "; use tls.internal"
  "control.backend" "" "control.ray_address" "" "control.admin_host" "" "control.admin_port" "" "control.advertised_address" "" "control.when_stopped" "" -}}
{{- range $path, $instead := $setByChart -}}
{{- $at := $spec -}}
{{- range $part := splitList "." $path -}}
{{- $at = ternary (get (default dict $at) $part) nil (kindIs "map" $at) -}}
{{- end -}}
{{- if $at }}{{ fail (printf "cluster.%s: set by the chart%s; leave it out" $path $instead) }}{{ end -}}
{{- end -}}
{{- if and (include "tandem.routerPods" .) (dig "router" "replicas" nil $spec) -}}
{{- fail "cluster.router.replicas: expected none with routers in pods of their own: set routers.replicas, or routers.autoscaling" -}}
{{- end -}}
{{- if not (dig "control" "start_timeout_s" nil $spec) -}}
{{- $_ := set $spec "control" (merge (dict "start_timeout_s" .Values.startupSeconds) (default dict $spec.control)) -}}
{{- end -}}
{{- /* A container's logs are what it prints. */ -}}
{{- $_ := set $spec "observability" (mergeOverwrite (dict "logs" (dict "target" "stdout")) (default dict $spec.observability)) -}}
{{- if include "tandem.hasGroups" . -}}
{{- $_ := set $spec "models" (include "tandem.groupedModels" . | fromJsonArray) -}}
{{- end -}}
{{- $several := eq (include "tandem.severalPods" .) "true" -}}
{{- $set := dict
  "router" (dict "http_host" "${POD_IP}" "http_port" 8000 "grpc_host" "${POD_IP}" "grpc_port" 50051)
  "control" (dict "backend" "ray" "ray_address" "auto" "admin_host" (ternary "${POD_IP}" "127.0.0.1" (or $several .Values.scaleAdapter.enabled)) "admin_port" 50050)
  "transfer" (dict "bind_host" (ternary "auto" "127.0.0.1" $several))
  "redis" (dict "mode" "embedded") -}}
{{- if ne .Values.redis.mode "embedded" -}}
{{- $_ := set $set "redis" (dict "mode" "external" "url" "${TANDEM_REDIS_URL}") -}}
{{- end -}}
{{- if include "tandem.routerPods" . -}}
{{- $_ := set $set.router "replicas" 0 -}}
{{- $_ := set $set.control "advertised_address" (printf "%s-control.%s.svc:50050" (include "tandem.fullname" .) .Release.Namespace) -}}
{{- end -}}
{{- if and (include "tandem.routerPods" .) .Values.ray.gcsFaultTolerance.enabled (not .Values.node.onHead) -}}
{{- $_ := set $set.control "when_stopped" "leave" -}}
{{- end -}}
{{- if .Values.scaleAdapter.enabled -}}
{{- $_ := set $set "autoscaler" (dict "external" true) -}}
{{- end -}}
{{- if .Values.gateway.inferencePool.enabled -}}
{{- $_ := set $set "observability" (dict "metrics" (dict "model_server_protocol" true)) -}}
{{- end -}}
{{- if include "tandem.edgeSecret" . -}}
{{- $_ := set $set.router "tls" (dict "cert" "/etc/tandem-tls/edge/tls.crt" "key" "/etc/tandem-tls/edge/tls.key") -}}
{{- end -}}
{{- if include "tandem.internalTls" . -}}
{{- $folder := "/etc/tandem-tls/internal/" -}}
{{- $files := dict "cert" (print $folder "tls.crt") "key" (print $folder "tls.key") "ca" (print $folder "ca.crt") -}}
{{- $_ := set $set "security" (dict "tls" $files) -}}
{{- end -}}
{{- if .Values.auth.existingSecret -}}
{{- $file := printf "/etc/tandem-keys/%s" .Values.auth.key -}}
{{- $_ := set $set "security" (merge (default dict $set.security) (dict "auth" (dict "keys_file" $file))) -}}
{{- end -}}
{{- $spec = mergeOverwrite $spec $set -}}
{{- /* Inside the cluster's network, authentication is off unless the values turn it on. */ -}}
{{- $auth := dig "security" "auth" nil $spec | default dict -}}
{{- if not (or $auth.mode $auth.keys_file $auth.api_key_sha256 $auth.jwt) -}}
{{- $_ := set $spec "security" (mergeOverwrite (default dict $spec.security) (dict "auth" (dict "mode" "none"))) -}}
{{- end -}}
{{- toYaml $spec -}}
{{- end -}}

{{- /* What the platform must mount into the head pod. Router pods name missing files themselves. `tandem up` and `tandem doctor` report what is missing. Text with brackets or
colons must be written by the YAML writer. */ -}}
{{- define "tandem.requirements" -}}
{{- $found := list -}}
{{- $ownRouters := not (include "tandem.routerPods" .) -}}
{{- with and $ownRouters (include "tandem.edgeSecret" .) -}}
{{- range $file := list "tls.crt" "tls.key" -}}
{{- $found = append $found (dict "value" "tls.edge" "what" (printf "Secret %s with %s" (include "tandem.edgeSecret" $) $file) "path" (print "/etc/tandem-tls/edge/" $file)) -}}
{{- end -}}
{{- end -}}
{{- if include "tandem.internalTls" . -}}
{{- $source := printf "Secret %s" (include "tandem.internalSecret" (list . "head")) -}}
{{- if .Values.tls.internal.certManager.csi }}{{ $source = "a volume of csi.cert-manager.io" }}{{ end -}}
{{- range $file := list "tls.crt" "tls.key" "ca.crt" -}}
{{- $found = append $found (dict "value" "tls.internal" "what" (printf "%s with %s" $source $file) "path" (print "/etc/tandem-tls/internal/" $file)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.auth -}}
{{- if and $ownRouters .existingSecret -}}
{{- $found = append $found (dict "value" "auth.existingSecret" "what" (printf "Secret %s with %s" .existingSecret .key) "path" (print "/etc/tandem-keys/" .key)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.redis -}}
{{- if eq .mode "valkey" -}}
{{- $found = append $found (dict "value" "redis.valkey.auth.existingSecret" "what" (printf "Secret %s with %s" .valkey.auth.existingSecret .valkey.auth.key) "variable" "VALKEY_PASSWORD") -}}
{{- else if eq .mode "external" -}}
{{- $found = append $found (dict "value" "redis.external.existingSecret" "what" (printf "Secret %s with %s" .external.existingSecret .external.key) "variable" "TANDEM_REDIS_URL") -}}
{{- end -}}
{{- end -}}
{{- with include "tandem.redisCaSecret" . -}}
{{- $value := ternary "redis.valkey.tls.existingSecret" "redis.external.caSecret" (eq $.Values.redis.mode "valkey") -}}
{{- $found = append $found (dict "value" $value "what" (printf "Secret %s with ca.crt" .) "path" "/etc/tandem-redis/ca.crt") -}}
{{- end -}}
{{- with .Values.models.hubTokenSecret -}}
{{- if .name -}}
{{- $found = append $found (dict "value" "models.hubTokenSecret" "what" (printf "Secret %s with %s" .name .key) "variable" "HF_TOKEN") -}}
{{- end -}}
{{- end -}}
{{- $volume := include "tandem.modelVolume" . -}}
{{- range $index, $model := .Values.cluster.models -}}
{{- if hasPrefix "/" (default "" $model.source) -}}
{{- $found = append $found (dict "value" (printf "cluster.models[%d].source" $index) "what" (printf "the model in the model volume (%s)" $volume) "path" $model.source) -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{- /* What makes a new head pod if it changes: its files, but for what `tandem apply` changes in a running cluster
(cluster/spec/changes.py), which start-head.sh does. It contains nothing that changes with the chart's version alone. */ -}}
{{- define "tandem.fixedConfig" -}}
{{- $spec := include "tandem.clusterSpec" . | fromYaml -}}
{{- $_ := unset $spec "autoscaler" -}}
{{- $_ := unset $spec "log_level" -}}
{{- $_ := unset $spec "log_levels" -}}
{{- $_ := set $spec "router" (pick $spec.router "replicas" "http_host" "http_port" "grpc_host" "grpc_port" "tls") -}}
{{- range $model := $spec.models -}}
{{- /* Its workers start with room for adapters if it has any, or if they are told to. */ -}}
{{- if and $model.adapters (not (dig "engine" "vllm" "enable_lora" false $model)) -}}
{{- $_ := set $model "adapters" true -}}
{{- else -}}
{{- $_ := unset $model "adapters" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- with get $model $role -}}
{{- $_ := unset . "workers" -}}
{{- end -}}
{{- if not (get $model $role) }}{{ $_ := unset $model $role }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toYaml $spec }}
{{ include "tandem.requirements" . }}
{{ .Files.Get "files/start-head.sh" }}
{{- end -}}

{{- /* The head's files. */ -}}
{{- define "tandem.configFiles" -}}
cluster.yaml: |
  {{- include "tandem.clusterSpec" . | nindent 2 }}
requirements.yaml: |
  {{- include "tandem.requirements" . | nindent 2 }}
start-head.sh: |
  {{- .Files.Get "files/start-head.sh" | trim | nindent 2 }}
{{- end -}}

{{- /* The volume at /models that was given; empty: an emptyDir. */ -}}
{{- define "tandem.modelVolume" -}}
{{- with .Values.models -}}
{{- if .existingClaim }}claim {{ .existingClaim }}{{ else if .hostPath }}hostPath {{ .hostPath }}{{ else if .image.reference }}image {{ .image.reference }}{{ end -}}
{{- end -}}
{{- end -}}
