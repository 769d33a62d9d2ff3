{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tandem.fullname" -}}
{{- include "tandem.releaseName" (list . .Release.Name) -}}
{{- end -}}

{{- /* The full name of a release, of this one or another whose values have the same names. */ -}}
{{- define "tandem.releaseName" -}}
{{- $root := index . 0 -}}{{- $release := index . 1 -}}
{{- if and $root.Values.fullnameOverride (eq $release $root.Release.Name) -}}
{{- $root.Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tandem.name" $root) $release -}}
{{- $release | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" $release (include "tandem.name" $root) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* KubeRay overwrites app.kubernetes.io/name on its pods, so no selector uses it. */ -}}
{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: tandem
{{- end -}}

{{- /* Labels of pod templates. They contain no version, because a changed label makes new pods. */ -}}
{{- define "tandem.podLabels" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/name: {{ include "tandem.name" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "tandem.image" -}}
{{- include "tandem.imageOf" (list . .Values.image) -}}
{{- end -}}

{{- /* Args: (root, image values). */ -}}
{{- define "tandem.imageOf" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{- $version := ternary (print "@" $image.digest) (print ":" ($image.tag | default $root.Chart.AppVersion)) (ne $image.digest "") -}}
{{- include "tandem.fromRegistry" (list $root (print $image.repository $version)) -}}
{{- end -}}

{{- /* An image in global.imageRegistry, if that is set. As in Docker, a first part with a dot or a colon is its own registry. */ -}}
{{- define "tandem.fromRegistry" -}}
{{- $image := index . 1 -}}
{{- $own := regexFind "^(localhost|[^/]*[.:][^/]*)/" $image -}}
{{- with (index . 0).Values.global.imageRegistry -}}
{{ . }}/{{ trimPrefix $own $image }}
{{- else -}}
{{ $image }}
{{- end -}}
{{- end -}}

{{- define "tandem.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "tandem.fullname" .) -}}
{{- end -}}

{{- define "tandem.headServiceAccount" -}}
{{- if and .Values.ray.autoscaling.enabled (not .Values.serviceAccount.name) -}}
{{ include "tandem.fullname" . }}-head
{{- else -}}
{{ include "tandem.serviceAccount" . }}
{{- end -}}
{{- end -}}

{{- /* "true" if several pods exchange KV and prefix events, else empty. */ -}}
{{- define "tandem.severalPods" -}}
{{- if or (gt (.Values.node.replicas | int) 0) .Values.nodeGroups .Values.ray.autoscaling.enabled (not .Values.node.onHead) (include "tandem.routerPods" .) }}true{{ end -}}
{{- end -}}

{{- /* "true" if routers have pods of their own, else empty. */ -}}
{{- define "tandem.routerPods" -}}
{{- if or (gt (.Values.routers.replicas | int) 0) .Values.routers.autoscaling.enabled }}true{{ end -}}
{{- end -}}

{{- /* "true" if other pods than the nodes' call the controller, at a Service of its own, else empty. */ -}}
{{- define "tandem.controlService" -}}
{{- if or (include "tandem.routerPods" .) .Values.scaleAdapter.enabled }}true{{ end -}}
{{- end -}}

{{- /* The component whose pods take clients' requests. */ -}}
{{- define "tandem.edge" -}}
{{- ternary "router" "head" (eq (include "tandem.routerPods" .) "true") -}}
{{- end -}}

{{- /* "true" if clients need an API key or a token, else empty. */ -}}
{{- define "tandem.asksForKeys" -}}
{{- if or .Values.auth.existingSecret (dig "security" "auth" "jwt" nil .Values.cluster) }}true{{ end -}}
{{- end -}}

{{- /* How many routers one pod has, each with ports of its own. */ -}}
{{- define "tandem.routers" -}}
{{- ternary 1 (dig "router" "replicas" 1 .Values.cluster) (eq (include "tandem.routerPods" .) "true") -}}
{{- end -}}

{{- /* The name of one router's port, such as `http` or `http-1`. Args: (kind, number of the router). */ -}}
{{- define "tandem.portName" -}}
{{- $kind := index . 0 -}}{{- $number := index . 1 | int -}}
{{- ternary $kind (printf "%s-%d" $kind $number) (eq $number 0) -}}
{{- end -}}

{{- /* The Secret with the edge's certificate, existing or from cert-manager; empty: no TLS. */ -}}
{{- define "tandem.edgeSecret" -}}
{{- with .Values.tls.edge -}}
{{- if .existingSecret }}{{ .existingSecret }}{{ else if .certManager.enabled }}{{ include "tandem.fullname" $ }}-edge-tls{{ end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.edgeName" -}}
{{- .Values.tls.edge.serverName | default (printf "%s-http.%s.svc" (include "tandem.fullname" .) .Release.Namespace) -}}
{{- end -}}

{{- /* The Secret with a pod's internal certificate. Args: (root, head, node, router, roll or scale). */ -}}
{{- define "tandem.internalSecret" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
{{- with $root.Values.tls.internal -}}
{{- if .existingSecret -}}
{{- get (dict "node" .nodeSecret "router" .routerSecret) $component | default .existingSecret -}}
{{- else if .certManager.enabled -}}
{{- include "tandem.fullname" $root }}-{{ $component }}-tls
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Where Ray keeps its tables (ray.gcsFaultTolerance): the release's Valkey, or another Redis. */ -}}
{{- define "tandem.rayRedisAddress" -}}
{{- with .Values.ray.gcsFaultTolerance.address -}}
{{ . }}
{{- else -}}
{{ ternary "rediss" "redis" (ne .Values.redis.valkey.tls.existingSecret "") }}://{{ include "tandem.fullname" . }}-valkey:6379
{{- end -}}
{{- end -}}

{{- /* In the release's Valkey the user is the chart's. */ -}}
{{- define "tandem.rayRedisUser" -}}
{{- ternary .Values.ray.gcsFaultTolerance.username "ray" (ne .Values.ray.gcsFaultTolerance.address "") -}}
{{- end -}}

{{- /* Ray's keys are RAY, this, @ and the table's name. */ -}}
{{- define "tandem.rayNamespace" -}}
{{ .Release.Namespace }}.{{ include "tandem.fullname" . }}
{{- end -}}

{{- /* "true" if the release's Valkey keeps Ray's tables, else empty. */ -}}
{{- define "tandem.valkeyKeepsRay" -}}
{{- if and .Values.ray.gcsFaultTolerance.enabled (eq .Values.redis.mode "valkey") (not .Values.ray.gcsFaultTolerance.address) }}true{{ end -}}
{{- end -}}
