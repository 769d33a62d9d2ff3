{{- /* The templates of Ray's pods, which `tandem.template` compares. */ -}}

{{- define "tandem.headTemplate" -}}
metadata:
  labels:
    {{- include "tandem.podLabels" . | nindent 4 }}
    app.kubernetes.io/component: head
    {{- if and .Values.node.onHead (include "tandem.hasGroups" .) }}
    tandem/node-group: nodes
    {{- end }}
    {{- with include "tandem.podList" (list . "head" "labels") }}{{- . | nindent 4 }}{{- end }}
  annotations:
    checksum/config: {{ include "tandem.fixedConfig" . | sha256sum }}
    {{- with include "tandem.podAnnotations" (list . "head") }}{{- . | nindent 4 }}{{- end }}
spec:
  {{- include "tandem.podSpec" (list . "head") | nindent 2 }}
  containers:
    - name: ray-head
      image: {{ include "tandem.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [/bin/bash, /etc/tandem/start-head.sh]
      terminationMessagePolicy: FallbackToLogsOnError
      env:
        {{- include "tandem.env" . | nindent 8 }}
        {{- with include "tandem.redisEnv" . | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- if and .Values.ray.gcsFaultTolerance.enabled (hasPrefix "rediss:" (include "tandem.rayRedisAddress" .)) (include "tandem.redisCaSecret" .) }}
        - {name: RAY_REDIS_CA_CERT, value: /etc/tandem-redis/ca.crt}
        {{- end }}
        {{- with include "tandem.podList" (list . "head" "env") }}{{- . | nindent 8 }}{{- end }}
      {{- with include "tandem.podList" (list . "head" "envFrom") }}
      envFrom:
        {{- . | nindent 8 }}
      {{- end }}
      ports:
        - {name: gcs-server, containerPort: 6379}
        {{- if include "tandem.controlService" . }}
        - {name: admin, containerPort: 50050}
        {{- end }}
        {{- if not (include "tandem.routerPods" .) }}
        {{- range $number := until (include "tandem.routers" . | int) }}
        - {name: {{ include "tandem.portName" (list "http" $number) }}, containerPort: {{ add 8000 $number }}}
        - {name: {{ include "tandem.portName" (list "grpc" $number) }}, containerPort: {{ add 50051 $number }}}
        {{- end }}
        {{- end }}
      {{- if include "tandem.routerPods" . }}
      {{- /* The controller listens before workers are ready: they may take long, and routers wait for them. */}}
      startupProbe:
        tcpSocket: {port: admin}
        periodSeconds: 5
        failureThreshold: {{ div (add (.Values.startupSeconds | int) 4) 5 }}
      readinessProbe:
        tcpSocket: {port: admin}
        periodSeconds: 5
      livenessProbe:
        tcpSocket: {port: admin}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- else }}
      {{- include "tandem.edgeProbes" . | nindent 6 }}
      {{- end }}
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ .Values.preStopSeconds | quote }}]}
      resources:
        {{- if .Values.node.onHead }}
        {{- include "tandem.nodeResources" . | nindent 8 }}
        {{- else }}
        {{- toYaml .Values.head.resources | nindent 8 }}
        {{- end }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "tandem.volumeMounts" (list . "head") | nindent 8 }}
        {{- with include "tandem.podList" (list . "head" "volumeMounts") }}{{- . | nindent 8 }}{{- end }}
    {{- with include "tandem.podList" (list . "head" "containers") }}{{- . | nindent 4 }}{{- end }}
  volumes:
    {{- include "tandem.volumes" (list . "head") | nindent 4 }}
    {{- with include "tandem.podList" (list . "head" "volumes") }}{{- . | nindent 4 }}{{- end }}
  {{- $placed := ternary .Values.node .Values.head .Values.node.onHead }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" }}
  {{- with get $placed $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{- define "tandem.nodeTemplate" -}}
metadata:
  labels:
    {{- include "tandem.podLabels" . | nindent 4 }}
    app.kubernetes.io/component: node
    {{- if include "tandem.hasGroups" . }}
    tandem/node-group: {{ .Values.node.name | quote }}
    {{- end }}
    {{- with include "tandem.podList" (list . "node" "labels") }}{{- . | nindent 4 }}{{- end }}
  {{- with include "tandem.podAnnotations" (list . "node") }}
  annotations:
    {{- . | nindent 4 }}
  {{- end }}
spec:
  {{- include "tandem.podSpec" (list . "node") | nindent 2 }}
  containers:
    - name: ray-node
      image: {{ include "tandem.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [/bin/bash, -c]
      args:
        - ulimit -n 65536 || true; eval "exec $KUBERAY_GEN_RAY_START_CMD"
      terminationMessagePolicy: FallbackToLogsOnError
      env:
        {{- include "tandem.env" . | nindent 8 }}
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ include "tandem.nodeDrainSeconds" . | quote }}}
        {{- with include "tandem.podList" (list . "node" "env") }}{{- . | nindent 8 }}{{- end }}
      {{- with include "tandem.podList" (list . "node" "envFrom") }}
      envFrom:
        {{- . | nindent 8 }}
      {{- end }}
      lifecycle:
        preStop:
          # At SIGTERM (not the image's STOPSIGNAL) Ray drains its node: Tandem drains the workers there, and Ray,
          # and this container, ends as soon as nothing is left.
          exec: {command: [/bin/bash, -c, "sleep {{ .Values.preStopSeconds }}; kill -TERM 1; sleep infinity"]}
      readinessProbe:
        exec: {command: [/bin/bash, -c, 'ray health-check --address "$RAY_ADDRESS"']}
        periodSeconds: 30
        timeoutSeconds: 15
      livenessProbe:
        exec: {command: [/bin/bash, -c, 'ray health-check --address "$RAY_ADDRESS"']}
        periodSeconds: 30
        timeoutSeconds: 15
        failureThreshold: 21  # longer than the head may be away (RAY_gcs_rpc_server_reconnect_timeout_s)
        initialDelaySeconds: 60
      resources:
        {{- include "tandem.nodeResources" . | nindent 8 }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "tandem.volumeMounts" (list . "node") | nindent 8 }}
        {{- with include "tandem.podList" (list . "node" "volumeMounts") }}{{- . | nindent 8 }}{{- end }}
    {{- with include "tandem.podList" (list . "node" "containers") }}{{- . | nindent 4 }}{{- end }}
  volumes:
    {{- include "tandem.volumes" (list . "node") | nindent 4 }}
    {{- with include "tandem.podList" (list . "node" "volumes") }}{{- . | nindent 4 }}{{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" }}
  {{- with get $.Values.node $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with include "tandem.spread" (list . "node" .Values.node.topologySpreadConstraints) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* What `upgrade.strategy: rolling` compares: equal if a running pod need not be replaced. Args: (root, head or node). */ -}}
{{- define "tandem.template" -}}
{{- include (printf "tandem.%sTemplate" (index . 1)) (index . 0) | sha256sum | trunc 16 -}}
{{- end -}}

{{- /* A pod template, with the above. Args: (root, head or node). */ -}}
{{- define "tandem.rayPod" -}}
{{- $text := include (printf "tandem.%sTemplate" (index . 1)) (index . 0) -}}
{{- $line := printf "\n  annotations:\n    tandem/template: %q\n" (include "tandem.template" .) -}}
{{- if contains "\n  annotations:\n" $text -}}
{{- replace "\n  annotations:\n" $line $text -}}
{{- else -}}
{{- replace "\nspec:\n" (print $line "spec:\n") $text -}}
{{- end -}}
{{- end -}}
