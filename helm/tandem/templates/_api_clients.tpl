{{- /* Pods that call the API server and the controller: of the Job `roll` and the Deployment `scale`. */ -}}

{{- /* The account of such a pod, what it may do, and whom it reaches. Args: (root, component, rules of its Role). */ -}}
{{- define "tandem.apiClient" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
{{- $name := printf "%s-%s" (include "tandem.fullname" $root) $component -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  namespace: {{ $root.Release.Namespace }}
  name: {{ $name }}
  labels:
    {{- include "tandem.labels" $root | nindent 4 }}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  namespace: {{ $root.Release.Namespace }}
  name: {{ $name }}
  labels:
    {{- include "tandem.labels" $root | nindent 4 }}
rules:
  {{- index . 2 | toYaml | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  namespace: {{ $root.Release.Namespace }}
  name: {{ $name }}
  labels:
    {{- include "tandem.labels" $root | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $name }}, namespace: {{ $root.Release.Namespace }}}
{{- if $root.Values.networkPolicy.enabled }}
---
# To the API server, whose address no policy can name, and to the controller.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  namespace: {{ $root.Release.Namespace }}
  name: {{ $name }}
  labels:
    {{- include "tandem.labels" $root | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "tandem.selectorLabels" $root | nindent 6 }}
      app.kubernetes.io/component: {{ $component }}
  policyTypes: [Egress]
  egress:
    - ports:
        {{- range $root.Values.networkPolicy.apiServerPorts }}
        - {protocol: TCP, port: {{ . | int }}}
        {{- end }}
    - to:
        - podSelector:
            matchLabels:
              {{- include "tandem.selectorLabels" $root | nindent 14 }}
              app.kubernetes.io/component: head
      ports: [{protocol: TCP, port: admin}]
{{- end }}
{{- end -}}

{{- /* The spec of such a pod, which may be where the head may be. Only its container has the account's token. Args: (root, component, module, further arguments,
resources, further fields of the container as YAML). */ -}}
{{- define "tandem.apiClientPod" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
{{- $tls := include "tandem.internalTls" $root -}}
serviceAccountName: {{ include "tandem.fullname" $root }}-{{ $component }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- $place := ternary $root.Values.node $root.Values.head $root.Values.node.onHead }}
{{- range $key := list "nodeSelector" "tolerations" }}
{{- with get $place $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "tandem.podSettings" (list $root $component) | trim }}
{{ . }}
{{- end }}
{{- with include "tandem.podList" (list $root $component "initContainers") }}
initContainers:
  {{- . | nindent 2 }}
{{- end }}
containers:
  - name: {{ $component }}
    image: {{ include "tandem.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command: [python, -m, {{ index . 2 }}]
    args:
      - --namespace={{ $root.Release.Namespace }}
      - --release={{ $root.Release.Name }}
      - --controller={{ include "tandem.fullname" $root }}-control.{{ $root.Release.Namespace }}.svc:50050
      {{- range index . 3 }}
      - {{ . }}
      {{- end }}
      {{- if $tls }}
      - --tls-cert=/etc/tandem-tls/internal/tls.crt
      - --tls-key=/etc/tandem-tls/internal/tls.key
      - --tls-ca=/etc/tandem-tls/internal/ca.crt
      {{- end }}
    {{- with include "tandem.podList" (list $root $component "env") }}
    env:
      {{- . | nindent 6 }}
    {{- end }}
    {{- with include "tandem.podList" (list $root $component "envFrom") }}
    envFrom:
      {{- . | nindent 6 }}
    {{- end }}
    terminationMessagePolicy: FallbackToLogsOnError
    {{- with index . 5 | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    resources:
      {{- index . 4 | toYaml | nindent 6 }}
    securityContext:
      {{- toYaml $root.Values.securityContext | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: api-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
      {{- if $tls }}
      - {name: tls-internal, mountPath: /etc/tandem-tls/internal, readOnly: true}
      {{- end }}
      {{- with include "tandem.podList" (list $root $component "volumeMounts") }}{{- . | nindent 6 }}{{- end }}
  {{- with include "tandem.podList" (list $root $component "containers") }}{{- . | nindent 2 }}{{- end }}
volumes:
  - name: tmp
    emptyDir: {}
  - name: api-token
    {{- include "tandem.apiToken" $root | nindent 4 }}
  {{- if $tls }}
  {{- include "tandem.internalVolume" (list $root $component) | nindent 2 }}
  {{- end }}
  {{- with include "tandem.podList" (list $root $component "volumes") }}{{- . | nindent 2 }}{{- end }}
{{- end -}}

{{- /* A volume with the token of the pod's account, for the one container that mounts it. */ -}}
{{- define "tandem.apiToken" -}}
projected:
  sources:
    - serviceAccountToken: {path: token, expirationSeconds: 3607}
    - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
    - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end -}}
