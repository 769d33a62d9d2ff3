{{- /* Pools that Kubernetes scales (scaleAdapter). */ -}}

{{- /* The name under which a model is served. Args: the model's values. */ -}}
{{- define "tandem.servedName" -}}
{{- .name | default (default "smollm2-135m" .source | base | trimSuffix ".gguf") -}}
{{- end -}}

{{- /* The pools of all models, as a JSON array of their model, its index, role and name of the Pool. */ -}}
{{- define "tandem.pools" -}}
{{- $found := list -}}{{- $names := list -}}
{{- range $index, $model := .Values.cluster.models -}}
{{- $served := include "tandem.servedName" $model -}}
{{- $short := regexReplaceAll "[^a-z0-9]+" (lower $served) "-" | trimAll "-" | default "model" -}}
{{- if gt (len $short) 40 }}{{ $short = printf "%s-%s" (trunc 31 $short | trimSuffix "-") (sha256sum $served | trunc 8) }}{{ end -}}
{{- if has $short $names -}}
{{- fail (printf "cluster.models[%d].name: expected a name whose letters and digits differ from those of the other models, because scaleAdapter names objects by them, got %s" $index $served) -}}
{{- end -}}
{{- $names = append $names $short -}}
{{- range $role := list "prefill" "decode" -}}
{{- $found = append $found (dict "model" $served "index" $index "role" $role "name" (printf "%s-%s-%s" (include "tandem.fullname" $) $short $role)) -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* scaleAdapter.autoscalers with the names of their Pools and the index of their model, as a JSON array. */ -}}
{{- define "tandem.poolAutoscalers" -}}
{{- $pools := include "tandem.pools" . | fromJsonArray -}}
{{- $models := list -}}
{{- range .Values.cluster.models }}{{ $models = append $models (include "tandem.servedName" .) }}{{ end -}}
{{- $found := list -}}{{- $seen := list -}}
{{- range $number, $each := .Values.scaleAdapter.autoscalers -}}
{{- $where := printf "scaleAdapter.autoscalers[%d]" $number -}}
{{- $model := $each.model | default (ternary (first $models) "" (eq (len $models) 1)) -}}
{{- if not (has $model $models) -}}
{{- fail (printf "%s.model: expected one of %s, got %s" $where (join ", " $models) ($each.model | default "none")) -}}
{{- end -}}
{{- if lt ($each.maxReplicas | int) ($each.minReplicas | default 1 | int) -}}
{{- fail (printf "%s.maxReplicas: expected at least minReplicas (%d), got %d" $where ($each.minReplicas | default 1 | int) ($each.maxReplicas | int)) -}}
{{- end -}}
{{- range $index, $metric := $each.metrics -}}
{{- $source := get $metric (lower $metric.type) | default dict -}}
{{- if not (has $metric.type (list "External" "Object")) -}}
{{- fail (printf "%s.metrics[%d].type: expected External or Object, got %v: workers are no pods, so Kubernetes has no metric of them by pod" $where $index $metric.type) -}}
{{- end -}}
{{- if ne (dig "target" "type" "" $source) "AverageValue" -}}
{{- fail (printf "%s.metrics[%d].%s.target.type: expected AverageValue, the metric's sum over the pool for each worker, got %v: for Value Kubernetes counts pods, and workers are none" $where $index (lower $metric.type) (dig "target" "type" "none" $source)) -}}
{{- end -}}
{{- end -}}
{{- range $pool := $pools -}}
{{- if and (eq $pool.model $model) (eq $pool.role $each.role) -}}
{{- if has $pool.name $seen -}}
{{- fail (printf "%s: expected one autoscaler for each pool, got another for %s of %s" $where $each.role $model) -}}
{{- end -}}
{{- if not (include "tandem.poolWorkers" (get (index $.Values.cluster.models ($pool.index | int)) $pool.role | default dict) | int) -}}
{{- fail (printf "cluster.models[%d].%s.workers: expected at least 1 worker at the start with %s, because Kubernetes switches an autoscaler off at 0, got 0; or scale the pool by KEDA" ($pool.index | int) $pool.role $where) -}}
{{- end -}}
{{- $seen = append $seen $pool.name -}}
{{- $found = append $found (merge (dict "pool" $pool.name "index" $pool.index "where" $where) $each) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- define "tandem.checkScaleAdapter" -}}
{{- if and .Values.scaleAdapter.autoscalers (not .Values.scaleAdapter.enabled) -}}
{{- fail "scaleAdapter.autoscalers: expected none without scaleAdapter.enabled: there would be no Pool to scale; set scaleAdapter.enabled: true" -}}
{{- end -}}
{{- if and .Values.scaleAdapter.enabled (dig "autoscaler" "enabled" false .Values.cluster) -}}
{{- fail "cluster.autoscaler.enabled: expected false with scaleAdapter.enabled: two autoscalers would undo each other's changes; set one of them" -}}
{{- end -}}
{{- end -}}
