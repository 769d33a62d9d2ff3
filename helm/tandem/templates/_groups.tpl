{{- /* Node groups: `node` is the group `nodes`; those of nodeGroups have what they say, and otherwise what `node` says. */ -}}

{{- /* The groups, as a JSON array of their values with `name`, `where` (the value to name in a message; `resourcesOf`: for its resources), `isUsed`, `pods` and `most`
(the number of pods now and at most; with ray.autoscaling both are at most; with onHead the head pod is one of `nodes`). KubeRay
keeps the pods of a group that is no longer there, so `nodes` always is. A template takes one in place of `node`. */ -}}
{{- define "tandem.nodeGroups" -}}
{{- $node := .Values.node -}}{{- $grows := .Values.ray.autoscaling.enabled -}}
{{- $isUsed := or (gt ($node.replicas | int) 0) $node.onHead (and $grows (not .Values.nodeGroups)) -}}
{{- $found := list (dict "name" "nodes" "where" "node" "resourcesOf" "node" "onHead" $node.onHead "isUsed" $isUsed) -}}
{{- $names := list $node -}}
{{- if not $isUsed }}{{ $_ := set (first $found) "minReplicas" 0 }}{{ $_ := set (first $found) "maxReplicas" 0 }}{{ end -}}
{{- range $index, $group := .Values.nodeGroups -}}
{{- $where := printf "nodeGroups[%d]" $index -}}
{{- $found = append $found (dict "name" $group.name "where" $where "resourcesOf" (ternary $where "node" (hasKey $group "resources")) "onHead" false "isUsed" true) -}}
{{- $names = append $names $group -}}
{{- end -}}
{{- range $number, $group := $found -}}
{{- $own := index $names $number -}}
{{- $replicas := default 0 $own.replicas | int -}}
{{- /* Not by `merge`, which takes 0 and [] for absent. */ -}}
{{- range $values := list $own (dict "replicas" 0 "minReplicas" 0 "maxReplicas" $replicas) $node -}}
{{- range $key, $value := $values -}}
{{- if not (hasKey $group $key) }}{{ $_ := set $group $key $value }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $head := ternary 1 0 $group.onHead -}}
{{- $most := ternary (max ($group.maxReplicas | int) $replicas) 0 (or $grows (gt $replicas 0)) -}}
{{- $_ := set $group "most" (add $most $head) -}}
{{- $_ := set $group "pods" (ternary (add $most $head) (add $replicas $head) $grows) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* Those where workers may be. */ -}}
{{- define "tandem.usedGroups" -}}
{{- $used := list -}}
{{- range include "tandem.nodeGroups" . | fromJsonArray }}{{ if .isUsed }}{{ $used = append $used . }}{{ end }}{{ end -}}
{{- toJson $used -}}
{{- end -}}

{{- /* "true" if workers are placed by group, so that Ray's nodes need the label, else empty. */ -}}
{{- define "tandem.hasGroups" -}}
{{- $found := or .Values.nodeGroups (lt (len .Values.node.roles) 2) -}}
{{- range $model := .Values.cluster.models -}}
{{- range $role := list "prefill" "decode" }}{{ with get $model $role }}{{ if .node_groups }}{{ $found = true }}{{ end }}{{ end }}{{ end -}}
{{- end -}}
{{- if $found }}true{{ end -}}
{{- end -}}

{{- /* The names of the groups where a pool's workers may be, as JSON: the pool's own, or those with its role. Args: (groups, role,
the pool's node_groups, index of the model, its workers). */ -}}
{{- define "tandem.groupsOf" -}}
{{- $role := index . 1 -}}{{- $asked := index . 2 | default list -}}{{- $at := printf "cluster.models[%d].%s.node_groups" (index . 3) $role -}}
{{- $names := list -}}{{- $found := list -}}
{{- range index . 0 -}}
{{- $names = append $names .name -}}
{{- if ternary (has .name $asked) (has $role .roles) (gt (len $asked) 0) }}{{ $found = append $found .name }}{{ end -}}
{{- end -}}
{{- range $asked -}}
{{- if not (has . $names) }}{{ fail (printf "%s: expected names of node groups that have pods (%s), got %s" $at (join ", " $names) .) }}{{ end -}}
{{- end -}}
{{- if not (index . 4) }}{{ $found = default $names $found }}{{ end -}}
{{- if not $found -}}
{{- fail (printf "nodeGroups: expected a group whose roles have %s, as node.roles and those of nodeGroups have it nowhere" $role) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* The models of the spec, whose pools say their groups, as JSON. */ -}}
{{- define "tandem.groupedModels" -}}
{{- $groups := include "tandem.usedGroups" . | fromJsonArray -}}
{{- $models := deepCopy .Values.cluster.models -}}
{{- range $index, $model := $models -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := get $model $role | default dict -}}
{{- $allowed := include "tandem.groupsOf" (list $groups $role $pool.node_groups $index (include "tandem.poolWorkers" $pool | int)) | fromJsonArray -}}
{{- if lt (len $allowed) (len $groups) }}{{ $_ := set $model $role (set $pool "node_groups" $allowed) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toJson $models -}}
{{- end -}}

{{- define "tandem.poolWorkers" -}}
{{- ternary .workers 1 (hasKey . "workers") -}}
{{- end -}}
