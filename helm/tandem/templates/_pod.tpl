{{- /* All Secrets are optional, so the pod starts and Tandem can report which one is missing. */ -}}

{{- define "tandem.redisEnv" -}}
{{- if eq .Values.redis.mode "valkey" }}
{{- $secure := .Values.redis.valkey.tls.existingSecret }}
- name: VALKEY_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.valkey.auth.existingSecret }}
      key: {{ .Values.redis.valkey.auth.key }}
      optional: true
- name: TANDEM_REDIS_URL
  value: {{ ternary "rediss" "redis" (ne $secure "") }}://tandem:$(VALKEY_PASSWORD)@{{ include "tandem.fullname" . }}-valkey:6379/0{{ ternary "?ssl_ca_certs=/etc/tandem-redis/ca.crt" "" (ne $secure "") }}
{{- else if eq .Values.redis.mode "external" }}
- name: TANDEM_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.external.existingSecret }}
      key: {{ .Values.redis.external.key }}
      optional: true
{{- end }}
{{- end -}}

{{- /* What `pod` values add to the pods of a component (head, node, router, scale or valkey), as JSON. With node.onHead the head pod is a node
too: it gets node.pod, and then head.pod. Args: (root, component). */ -}}
{{- define "tandem.pod" -}}
{{- $values := (index . 0).Values -}}{{- $component := index . 1 -}}
{{- $sources := list -}}
{{- if eq $component "valkey" }}{{ $sources = list $values.redis.valkey.pod }}{{ end -}}
{{- if eq $component "router" }}{{ $sources = list $values.routers.pod }}{{ end -}}
{{- if eq $component "scale" }}{{ $sources = list $values.scaleAdapter.pod }}{{ end -}}
{{- if or (eq $component "node") (and (eq $component "head") $values.node.onHead) }}{{ $sources = list $values.node.pod }}{{ end -}}
{{- if eq $component "head" }}{{ $sources = append $sources $values.head.pod }}{{ end -}}
{{- $found := dict -}}
{{- range $source := $sources -}}
{{- range $key, $value := $source -}}
{{- if kindIs "slice" $value -}}
{{- $_ := set $found $key (concat (get $found $key | default list) $value) -}}
{{- else if kindIs "map" $value -}}
{{- $_ := set $found $key (mergeOverwrite (deepCopy (get $found $key | default dict)) $value) -}}
{{- else if $value -}}
{{- $_ := set $found $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* One list of the above, or nothing. Args: (root, component, key). */ -}}
{{- define "tandem.podList" -}}
{{- with get (include "tandem.pod" . | fromJson) (index . 2) }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- /* podAnnotations and those of pod values. Args: (root, component). */ -}}
{{- define "tandem.podAnnotations" -}}
{{- with mergeOverwrite (deepCopy (index . 0).Values.podAnnotations) (get (include "tandem.pod" . | fromJson) "annotations" | default dict) }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- /* The settings of a pod that stand beside its containers. Args: (root, component). */ -}}
{{- define "tandem.podSettings" -}}
{{- $pod := include "tandem.pod" . | fromJson -}}
{{- range $key := list "priorityClassName" "schedulerName" "hostNetwork" "dnsPolicy" "dnsConfig" "hostAliases" "resourceClaims" }}
{{- with get $pod $key }}
{{ dict $key . | toYaml }}
{{- end }}
{{- end }}
{{- if and $pod.hostNetwork (not $pod.dnsPolicy) }}
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- end -}}

{{- define "tandem.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: HOME, value: /home/tandem}
{{- /* In the volume at /models, if it is writable, so that what is there lasts. */}}
{{- $writable := ternary "/home/tandem" "/models" (ne .Values.models.image.reference "") }}
- {name: XDG_CACHE_HOME, value: {{ $writable }}/.cache}
- {name: XDG_DATA_HOME, value: {{ $writable }}/.data}
- {name: TANDEM_TERMINATION_LOG, value: /dev/termination-log}
- {name: TANDEM_REQUIREMENTS, value: /etc/tandem/requirements.yaml}
- {name: RAY_health_check_period_ms, value: "500"}
- {name: RAY_health_check_timeout_ms, value: "1000"}
- {name: RAY_health_check_failure_threshold, value: "3"}
{{- if .Values.models.hubTokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.models.hubTokenSecret.name }}
      key: {{ .Values.models.hubTokenSecret.key }}
      optional: true
{{- end }}
{{- end -}}

{{- /* Probes of a container with a router. In the head pod a start ends when workers have loaded their models; a router with
a pod of its own waits for them as long as it takes. */ -}}
{{- define "tandem.edgeProbes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne (include "tandem.edgeSecret" .) "") -}}
startupProbe:
  httpGet: {path: {{ ternary "/health" "/ready" (eq (include "tandem.routerPods" .) "true") }}, port: http, scheme: {{ $scheme }}}
  periodSeconds: 5
  failureThreshold: {{ div (add (.Values.startupSeconds | int) 4) 5 }}
readinessProbe:
  httpGet: {path: /ready, port: http, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 2
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /health, port: http, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "tandem.redisCaSecret" -}}
{{- if eq .Values.redis.mode "valkey" -}}
{{- .Values.redis.valkey.tls.existingSecret -}}
{{- else if eq .Values.redis.mode "external" -}}
{{- .Values.redis.external.caSecret -}}
{{- end -}}
{{- end -}}

{{- /* Only pods with routers have the keys and the edge's certificate. Args: (root, head, node or
router). A router's pod needs no model: the controller sends it the tokenizers. */ -}}
{{- define "tandem.volumeMounts" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/tandem}
{{- if ne $component "router" }}
- {name: shared-memory, mountPath: /dev/shm}
- {name: models, mountPath: /models{{ if $root.Values.models.image.reference }}, readOnly: true{{ end }}}
- {name: config, mountPath: /etc/tandem, readOnly: true}
{{- end }}
{{- if include "tandem.internalTls" $root }}
- {name: tls-internal, mountPath: /etc/tandem-tls/internal, readOnly: true}
{{- end }}
{{- if eq $component (include "tandem.edge" $root) }}
{{- if include "tandem.edgeSecret" $root }}
- {name: tls-edge, mountPath: /etc/tandem-tls/edge, readOnly: true}
{{- end }}
{{- if $root.Values.auth.existingSecret }}
- {name: keys, mountPath: /etc/tandem-keys, readOnly: true}
{{- end }}
{{- end }}
{{- if include "tandem.redisCaSecret" $root }}
- {name: redis-ca, mountPath: /etc/tandem-redis, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tandem.volumes" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
{{- if ne $component "router" }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ include "tandem.sharedMemory" $root }}}
- name: models
  {{- with $root.Values.models }}
  {{- if .existingClaim }}
  persistentVolumeClaim: {claimName: {{ .existingClaim }}}
  {{- else if .hostPath }}
  hostPath: {path: {{ .hostPath | quote }}, type: Directory}
  {{- else if .image.reference }}
  image: {reference: {{ include "tandem.fromRegistry" (list $root .image.reference) | quote }}, pullPolicy: {{ .image.pullPolicy }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .emptyDirSize }}}
  {{- end }}
  {{- end }}
- name: config
  configMap: {name: {{ include "tandem.fullname" $root }}}
{{- end }}
{{- if and (eq $component "head") $root.Values.ray.autoscaling.enabled }}
- name: autoscaler-token
  {{- include "tandem.apiToken" $root | nindent 2 }}
{{- end }}
{{- if include "tandem.internalTls" $root }}
{{ include "tandem.internalVolume" . }}
{{- end }}
{{- if eq $component (include "tandem.edge" $root) }}
{{- with include "tandem.edgeSecret" $root }}
- name: tls-edge
  secret: {secretName: {{ . | quote }}, optional: true, defaultMode: 0440}
{{- end }}
{{- with $root.Values.auth.existingSecret }}
- name: keys
  secret: {secretName: {{ . | quote }}, optional: true, defaultMode: 0440}
{{- end }}
{{- end }}
{{- with include "tandem.redisCaSecret" $root }}
- name: redis-ca
  secret: {secretName: {{ . | quote }}, optional: true, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end -}}

{{- /* Models whose source is a path are already on the volume. */ -}}
{{- define "tandem.pullContainers" -}}
{{- $root := index . 0 -}}{{- $args := . -}}
{{- if $root.Values.models.pull }}
{{- $bytes := "" }}
{{- if not (include "tandem.modelVolume" $root) }}{{ $bytes = include "tandem.quantity" $root.Values.models.emptyDirSize | float64 | printf "%.0f" }}{{ end }}
{{- range $index, $source := include "tandem.pulledSources" $root | fromJsonArray }}
- name: pull-model-{{ $index }}
  image: {{ include "tandem.image" $root }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [tandem, pull, {{ $source | quote }}{{ with $bytes }}, --volume-bytes, {{ . | quote }}{{ end }}]
  terminationMessagePolicy: FallbackToLogsOnError
  env:
    {{- include "tandem.env" $root | nindent 4 }}
    {{- with include "tandem.podList" (append $args "env") }}{{- . | nindent 4 }}{{- end }}
  {{- with include "tandem.podList" (append $args "envFrom") }}
  envFrom:
    {{- . | nindent 4 }}
  {{- end }}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {memory: 4Gi}
  securityContext:
    {{- toYaml $root.Values.securityContext | nindent 4 }}
  volumeMounts:
    {{- include "tandem.volumeMounts" $args | nindent 4 }}
    {{- with include "tandem.podList" (append $args "volumeMounts") }}{{- . | nindent 4 }}{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Args: (root, head, node or router). */ -}}
{{- define "tandem.podSpec" -}}
{{- $root := index . 0 -}}
serviceAccountName: {{ include (ternary "tandem.headServiceAccount" "tandem.serviceAccount" (eq (index . 1) "head")) $root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- $grace := $root.Values.terminationGracePeriodSeconds }}
{{- if eq (index . 1) "router" }}{{ $grace = $root.Values.routers.terminationGracePeriodSeconds | default $grace }}{{ end }}
terminationGracePeriodSeconds: {{ $grace }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or (eq (index . 1) "node") (and $root.Values.node.onHead (eq (index . 1) "head")) }}
{{- with $root.Values.node.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}
{{- with include "tandem.podSettings" . | trim }}
{{ . }}
{{- end }}
{{- $own := include "tandem.podList" (append . "initContainers") }}
{{- $pulls := "" }}
{{- if ne (index . 1) "router" }}{{ $pulls = include "tandem.pullContainers" . }}{{ end }}
{{- with printf "%s\n%s" $own (trim $pulls) | trim }}
initContainers:
  {{- . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* How long Ray waits for work on a node that gets SIGTERM; 10 s of the grace period are for Ray's own shutdown. */ -}}
{{- define "tandem.nodeDrainSeconds" -}}
{{- sub (.Values.terminationGracePeriodSeconds | int) (add (.Values.preStopSeconds | int) 10) -}}
{{- end -}}

{{- define "tandem.nodeResources" -}}
{{- $resources := deepCopy .Values.node.resources -}}
{{- $devices := dict -}}
{{- if .Values.node.gpus }}{{ $_ := set $devices .Values.node.gpuResource (.Values.node.gpus | int) }}{{ end -}}
{{- with .Values.node.rdma }}{{ if .resource }}{{ $_ := set $devices .resource (.count | default 1 | int) }}{{ end }}{{ end -}}
{{- if $devices -}}
{{- $_ := set $resources "requests" (merge (default dict $resources.requests) $devices) -}}
{{- $_ := set $resources "limits" (merge (default dict $resources.limits) $devices) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- /* Args: (root, component, its constraints). */ -}}
{{- define "tandem.spread" -}}
{{- $component := index . 1 -}}
{{- $root := index . 0 -}}
{{- with index . 2 }}
topologySpreadConstraints:
  {{- range . }}
  {{- $labels := merge (dict "app.kubernetes.io/component" $component) (include "tandem.selectorLabels" $root | fromYaml) }}
  {{- if and (eq $component "node") (include "tandem.hasGroups" $root) }}{{ $_ := set $labels "tandem/node-group" $root.Values.node.name }}{{ end }}
  - {{- toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $labels))) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
