{{- /* Checks that models have room on the disks they are pulled to. What nobody says is estimated, and too low rather than too
high: only what clearly has no room is refused. */ -}}

{{- /* Of a model's weights, as JSON: `parameters`, bytes on the `disk`, and `how` that is known; zeros if it is not.
Args: (root, source). */ -}}
{{- define "tandem.weights" -}}
{{- $source := index . 1 -}}
{{- $name := lower (base $source) | replace "_" "-" -}}
{{- /* 1-8b may be 1.8b; of several counts, some are of tokens or of a model that this one was made of. */ -}}
{{- $count := "" -}}{{- $counted := 0.0 -}}
{{- range regexFindAll "(^|-)[0-9]+(\\.[0-9]+|-[0-9])?[bmt]\\b" $name -1 -}}
{{- $each := trimPrefix "-" . | replace "-" "." -}}
{{- $number := mulf (regexFind "^[0-9.]+" $each | float64) (get (dict "m" 0.9e6 "b" 0.9e9 "t" 0.9e12) (regexFind "[bmt]$" $each)) -}}
{{- if or (not $count) (lt $number $counted) }}{{ $count = $each }}{{ $counted = $number }}{{ end -}}
{{- end -}}
{{- $experts := regexFind "(^|-)[0-9]+x[0-9]+(\\.[0-9]+)?b\\b" $name | trimPrefix "-" -}}
{{- $parameters := 0.0 -}}{{- $disk := 0.0 -}}{{- $how := "" -}}
{{- with get (index . 0).Values.models.weights $source -}}
{{- $disk = include "tandem.quantity" .size | float64 -}}
{{- $parameters = divf $disk (float64 (default 2 .bytesPerWeight)) -}}
{{- $how = printf "%s in models.weights" .size -}}
{{- else -}}
{{- if eq $source "smollm2-135m" -}}
{{- $parameters = 134515008.0 -}}{{- $disk = 650000000.0 -}}{{- $how = "the demo model" -}}
{{- else if $experts -}}
{{- /* Experts share a part of the parameters: 8x7b are 47e9. */ -}}
{{- $parameters = mulf (regexFind "^[0-9]+" $experts | float64) (regexFind "[0-9.]+b$" $experts | trimSuffix "b" | float64) 0.6e9 -}}
{{- $how = printf "%s in its name" $experts -}}
{{- else if $count -}}
{{- $parameters = $counted -}}
{{- $how = printf "%s in its name" $count -}}
{{- end -}}
{{- $disk = maxf $disk (mulf 2.0 $parameters) -}}
{{- end -}}
{{- toJson (dict "parameters" $parameters "disk" $disk "how" $how) -}}
{{- end -}}

{{- /* Names of models and draft models that init containers pull, as JSON. Paths are already on the volume. */ -}}
{{- define "tandem.pulledSources" -}}
{{- $sources := list -}}
{{- range .Values.cluster.models -}}
{{- $engines := list (dig "engine" dict .) (dig "prefill" "engine" dict .) (dig "decode" "engine" dict .) -}}
{{- $sources = append $sources (default "smollm2-135m" .source) -}}
{{- range $engines }}{{ with .speculation_model }}{{ $sources = append $sources . }}{{ end }}{{ end -}}
{{- end -}}
{{- $names := list -}}
{{- range uniq $sources }}{{ if not (hasPrefix "/" .) }}{{ $names = append $names . }}{{ end }}{{ end -}}
{{- toJson $names -}}
{{- end -}}

{{- /* What the models that init containers pull need in the volume at /models, as JSON: `bytes`, and `of` for a message. */ -}}
{{- define "tandem.pulledWeights" -}}
{{- $bytes := 0.0 -}}{{- $of := list -}}
{{- range $source := include "tandem.pulledSources" . | fromJsonArray -}}
{{- $weights := include "tandem.weights" (list $ $source) | fromJson -}}
{{- $bytes = addf $bytes $weights.disk -}}
{{- with $weights.how }}{{ $of = append $of (printf "%s (%s)" $source .) }}{{ end -}}
{{- end -}}
{{- toJson (dict "bytes" $bytes "of" (join ", " $of)) -}}
{{- end -}}

{{- define "tandem.checkWeights" -}}
{{- $sources := list -}}
{{- range .Values.cluster.models }}{{ $sources = append $sources (default "smollm2-135m" .source) }}{{ end -}}
{{- $sources = concat $sources (include "tandem.pulledSources" . | fromJsonArray) | uniq -}}
{{- range $source, $_ := .Values.models.weights -}}
{{- if not (has $source $sources) -}}
{{- fail (printf "models.weights: expected sources of cluster.models (%s), got %s" (join ", " $sources) $source) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.models.pull (not (include "tandem.modelVolume" .)) -}}
{{- $pulled := include "tandem.pulledWeights" . | fromJson -}}
{{- $remedy := printf "more than %s for %s" (include "tandem.gigabytes" $pulled.bytes) $pulled.of -}}
{{- $instead := "or mount a volume that holds them (models.existingClaim); if an estimate is wrong, say the size in models.weights" -}}
{{- if gt $pulled.bytes (include "tandem.quantity" .Values.models.emptyDirSize | float64) -}}
{{- fail (printf "models.emptyDirSize: expected %s, which each pod pulls, got %s; raise it, %s" $remedy .Values.models.emptyDirSize $instead) -}}
{{- end -}}
{{- $pods := list -}}
{{- if not .Values.node.onHead }}{{ $pods = append $pods (dict "where" "head" "resources" .Values.head.resources "root" . "component" "head") }}{{ end -}}
{{- range $group := include "tandem.usedGroups" . | fromJsonArray -}}
{{- $root := set (omit $ "Values") "Values" (set (omit $.Values "node") "node" $group) -}}
{{- $component := ternary "head" "node" $group.onHead -}}
{{- $pods = append $pods (dict "where" $group.resourcesOf "resources" $group.resources "root" $root "component" $component) -}}
{{- end -}}
{{- range $pods -}}
{{- $limit := include "tandem.ephemeralLimit" (prepend (include "tandem.podList" (list .root .component "containers") | fromYamlArray) (dict "resources" .resources)) -}}
{{- if and $limit (gt $pulled.bytes (float64 $limit)) -}}
{{- fail (printf "%s.resources.limits.ephemeral-storage: expected %s, as the volume at /models counts toward it, got %s in all containers; raise it, %s" .where $remedy (include "tandem.gigabytes" $limit) $instead) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The limit of a pod's local disks in bytes, as Kubernetes sums up those of its containers; empty: none has one. */ -}}
{{- define "tandem.ephemeralLimit" -}}
{{- $sum := 0.0 -}}{{- $found := false -}}
{{- range . -}}
{{- with dig "limits" "ephemeral-storage" "" (default dict .resources) }}{{ $found = true }}{{ $sum = addf $sum (include "tandem.quantity" . | float64) }}{{ end -}}
{{- end -}}
{{- if $found }}{{ printf "%.0f" $sum }}{{ end -}}
{{- end -}}

{{- define "tandem.gigabytes" -}}
{{- printf "%.1fGi" (divf (float64 .) 1073741824) -}}
{{- end -}}
