{{- /* Node groups: `node` is the group `nodes`; those of nodeGroups have what they say, and otherwise what `node` says. */ -}}

{{- /* The groups with pods, as a JSON array of their values with `name`, `where` (the value to name in a message), `pods` and `most`
(the number of pods now and at most; with onHead the head pod is one of `nodes`). A template takes one in place of `node`. */ -}}
{{- define "tandem.nodeGroups" -}}
{{- $found := list -}}
{{- $head := ternary 1 0 .Values.node.onHead -}}
{{- $node := .Values.node -}}
{{- if or (gt ($node.replicas | int) 0) $node.onHead -}}
{{- $most := max ($node.maxReplicas | int) ($node.replicas | int) -}}
{{- if not ($node.replicas | int) }}{{ $most = 0 }}{{ end -}}
{{- $numbers := dict "name" "nodes" "where" "node" "pods" (add ($node.replicas | int) $head) "most" (add $most $head) -}}
{{- $found = append $found (merge $numbers (deepCopy $node)) -}}
{{- end -}}
{{- range $index, $group := .Values.nodeGroups -}}
{{- $own := dict "name" $group.name "where" (printf "nodeGroups[%d]" $index) "pods" ($group.replicas | int) "most" (max ($group.maxReplicas | default 0 | int) ($group.replicas | int)) -}}
{{- /* Not by `merge`, which takes 0 and [] for absent. */ -}}
{{- range $values := list $group (dict "minReplicas" 0 "maxReplicas" ($group.replicas | int)) $node -}}
{{- range $key, $value := $values -}}
{{- if not (hasKey $own $key) }}{{ $_ := set $own $key $value }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $own "onHead" false -}}
{{- $found = append $found $own -}}
{{- end -}}
{{- toJson $found -}}
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
the pool's node_groups, index of the model). */ -}}
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
{{- if not $found -}}
{{- fail (printf "nodeGroups: expected a group whose roles have %s, as node.roles and those of nodeGroups have it nowhere" $role) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* The models of the spec, whose pools say their groups, as JSON. */ -}}
{{- define "tandem.groupedModels" -}}
{{- $groups := include "tandem.nodeGroups" . | fromJsonArray -}}
{{- $models := deepCopy .Values.cluster.models -}}
{{- range $index, $model := $models -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := get $model $role | default dict -}}
{{- $allowed := include "tandem.groupsOf" (list $groups $role $pool.node_groups $index) | fromJsonArray -}}
{{- if lt (len $allowed) (len $groups) }}{{ $_ := set $model $role (set $pool "node_groups" $allowed) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toJson $models -}}
{{- end -}}
