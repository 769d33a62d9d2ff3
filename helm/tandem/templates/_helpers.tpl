{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tandem.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tandem.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* KubeRay writes app.kubernetes.io/name on its pods itself, so nothing is selected by it. */ -}}
{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: tandem
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/name: {{ include "tandem.name" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "tandem.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- /* The cluster spec as the head reads it: the values, and what only the chart can know. ${…} is filled in the pod. */ -}}
{{- define "tandem.clusterSpec" -}}
{{- $spec := deepCopy .Values.cluster -}}
{{- if hasKey $spec "redis" }}{{ fail "cluster.redis: set by the chart; use the chart's own redis values" }}{{ end -}}
{{- range $path := list "router.http_host" "router.http_port" "router.grpc_host" "router.grpc_port" "control.backend" "control.ray_address" -}}
{{- $parts := splitList "." $path -}}
{{- if hasKey (default dict (get $spec (first $parts))) (last $parts) }}{{ fail (printf "cluster.%s: set by the chart; leave it out" $path) }}{{ end -}}
{{- end -}}
{{- $router := dict "http_host" "${POD_IP}" "http_port" 8000 "grpc_host" "${POD_IP}" "grpc_port" 50051 -}}
{{- $_ := set $spec "router" (mergeOverwrite (deepCopy (default dict $spec.router)) $router) -}}
{{- $_ := set $spec "control" (mergeOverwrite (deepCopy (default dict $spec.control)) (dict "backend" "ray" "ray_address" "auto")) -}}
{{- /* Inside the cluster's network nobody is asked, unless the values say so. */ -}}
{{- if not (dig "security" "auth" nil $spec) -}}
{{- $_ := set $spec "security" (mergeOverwrite (deepCopy (default dict $spec.security)) (dict "auth" (dict "mode" "none"))) -}}
{{- end -}}
{{- if eq .Values.redis.mode "embedded" -}}
{{- $_ := set $spec "redis" (dict "mode" "embedded") -}}
{{- else -}}
{{- $_ := set $spec "redis" (dict "mode" "external" "url" "${TANDEM_REDIS_URL}") -}}
{{- end -}}
{{- toYaml $spec -}}
{{- end -}}

{{- define "tandem.redisEnv" -}}
{{- if eq .Values.redis.mode "valkey" }}
- name: VALKEY_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.valkey.auth.existingSecret }}
      key: {{ .Values.redis.valkey.auth.key }}
- name: TANDEM_REDIS_URL
  value: redis://:$(VALKEY_PASSWORD)@{{ include "tandem.fullname" . }}-valkey:6379/0
{{- else if eq .Values.redis.mode "external" }}
- name: TANDEM_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.external.existingSecret }}
      key: {{ .Values.redis.external.key }}
{{- end }}
{{- end -}}

{{- define "tandem.volumeMounts" -}}
- {name: shared-memory, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/tandem}
- {name: models, mountPath: /models}
{{- end -}}

{{- define "tandem.volumes" -}}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.node.sharedMemory }}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
- name: models
  {{- if .Values.models.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.models.emptyDirSize }}}
  {{- end }}
{{- end -}}

{{- define "tandem.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: HOME, value: /home/tandem}
- {name: XDG_CACHE_HOME, value: /models/.cache}
- {name: XDG_DATA_HOME, value: /models/.data}
- {name: RAY_health_check_period_ms, value: "500"}
- {name: RAY_health_check_timeout_ms, value: "1000"}
- {name: RAY_health_check_failure_threshold, value: "3"}
{{- if .Values.models.hubTokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.models.hubTokenSecret.name }}
      key: {{ .Values.models.hubTokenSecret.key }}
{{- end }}
{{- end -}}

{{- /* Models whose source is a path are already on the volume. */ -}}
{{- define "tandem.pullContainers" -}}
{{- if .Values.models.pull }}
{{- range $index, $model := .Values.cluster.models }}
{{- $source := default "smollm2-135m" $model.source }}
{{- if not (hasPrefix "/" $source) }}
- name: pull-model-{{ $index }}
  image: {{ include "tandem.image" $ }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  command: [tandem, pull, {{ $source | quote }}]
  env:
    {{- include "tandem.env" $ | nindent 4 }}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {memory: 4Gi}
  securityContext:
    {{- toYaml $.Values.securityContext | nindent 4 }}
  volumeMounts:
    {{- include "tandem.volumeMounts" $ | nindent 4 }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.podSpec" -}}
serviceAccountName: {{ include "tandem.fullname" . }}
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $pulls := include "tandem.pullContainers" . }}
{{- if trim $pulls }}
initContainers:
  {{- trim $pulls | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tandem.nodeResources" -}}
{{- $resources := deepCopy .Values.node.resources -}}
{{- if .Values.node.gpus -}}
{{- $gpus := dict .Values.node.gpuResource (.Values.node.gpus | int) -}}
{{- $_ := set $resources "requests" (merge (default dict $resources.requests) $gpus) -}}
{{- $_ := set $resources "limits" (merge (default dict $resources.limits) $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
