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
{{- $auth := dig "security" "auth" nil .Values.cluster | default dict -}}
{{- if or .Values.auth.existingSecret $auth.jwt $auth.api_key_sha256 }}true{{ end -}}
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

{{- /* "true" if Tandem's processes use mutual TLS, else empty. */ -}}
{{- define "tandem.internalTls" -}}
{{- if or .Values.tls.internal.existingSecret .Values.tls.internal.certManager.enabled }}true{{ end -}}
{{- end -}}

{{- /* Names in the internal certificate of a component, as JSON: they are its holder's permissions, so a node's has only the role
worker. Args: (root, head, node, router, roll or scale). */ -}}
{{- define "tandem.internalNames" -}}
{{- $cluster := default "tandem" (index . 0).Values.cluster.name -}}
{{- $head := ternary (list "controller" "worker" "admin") (list "controller" "router" "worker" "admin") (eq (include "tandem.routerPods" (index . 0)) "true") -}}
{{- $dns := list -}}{{- $uris := list -}}
{{- range get (dict "head" $head "node" (list "worker") "router" (list "router") "roll" (list "admin") "scale" (list "admin")) (index . 1) -}}
{{- $dns = append $dns (printf "%s.%s.tandem.internal" . $cluster) -}}
{{- $uris = append $uris (printf "spiffe://tandem/%s/%s" $cluster .) -}}
{{- end -}}
{{- toJson (dict "dns" $dns "uris" $uris) -}}
{{- end -}}

{{- /* The volume with a pod's internal certificate, from a Secret or made for this pod alone. Args: as above. */ -}}
{{- define "tandem.internalVolume" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
- name: tls-internal
{{- with $root.Values.tls.internal.certManager }}
{{- if .csi }}
{{- $names := include "tandem.internalNames" (list $root $component) | fromJson }}
{{- $pod := printf "spiffe://tandem/%s/pod/${POD_NAMESPACE}/${POD_NAME}" (default "tandem" $root.Values.cluster.name) }}
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      csi.cert-manager.io/issuer-name: {{ .issuerRef.name | quote }}
      csi.cert-manager.io/issuer-kind: {{ .issuerRef.kind | quote }}
      {{- with .issuerRef.group }}
      csi.cert-manager.io/issuer-group: {{ . | quote }}
      {{- end }}
      csi.cert-manager.io/dns-names: {{ join "," $names.dns | quote }}
      csi.cert-manager.io/uri-sans: {{ append $names.uris $pod | join "," | quote }}
      csi.cert-manager.io/key-usages: digital signature,server auth,client auth
      {{- with .duration }}
      csi.cert-manager.io/duration: {{ . | quote }}
      {{- end }}
      {{- /* Without it, the driver takes the pod's group as the kubelet knows it, which OpenShift may have chosen. */}}
      {{- with $root.Values.podSecurityContext.fsGroup }}
      csi.cert-manager.io/fs-group: {{ . | int | quote }}
      {{- end }}
{{- else }}
  secret: {secretName: {{ include "tandem.internalSecret" (list $root $component) | quote }}, optional: {{ not (has $component (list "roll" "scale")) }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The Secret with a component's internal certificate. Args: as above. */ -}}
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
