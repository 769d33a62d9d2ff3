{{- /* Checks values that depend on each other. Fails with the value and the reason. Renders nothing. */ -}}
{{- define "tandem.checkValues" -}}
{{- with .Values.redis -}}
{{- if and (eq .mode "valkey") (not .valkey.auth.existingSecret) -}}
{{- fail (printf "redis.valkey.auth.existingSecret: expected the name of a Secret with the password at key %q, because redis.mode is valkey" .valkey.auth.key) -}}
{{- end -}}
{{- if and (eq .mode "external") (not .external.existingSecret) -}}
{{- fail (printf "redis.external.existingSecret: expected the name of a Secret with a redis:// or rediss:// URL at key %q, because redis.mode is external" .external.key) -}}
{{- end -}}
{{- end -}}
{{- with .Values.ray.gcsFaultTolerance -}}
{{- if and .enabled (not .existingSecret) -}}
{{- fail (printf "ray.gcsFaultTolerance.existingSecret: expected the name of a Secret with the password of Ray's user at key %q, because ray.gcsFaultTolerance.enabled is true" .key) -}}
{{- end -}}
{{- if and .enabled (not .address) (ne $.Values.redis.mode "valkey") -}}
{{- fail (printf "ray.gcsFaultTolerance.address: expected redis://HOST:PORT or rediss://HOST:PORT, because redis.mode is %s: only the release's own Valkey (redis.mode: valkey) needs no address" $.Values.redis.mode) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.redis.valkey.existingClaim (not (include "tandem.valkeyKeepsRay" .)) -}}
{{- fail "redis.valkey.existingClaim: expected none: without ray.gcsFaultTolerance in this Valkey, nothing there is worth keeping" -}}
{{- end -}}
{{- range $use := list "edge" "internal" -}}
{{- with get $.Values.tls $use -}}
{{- if and .existingSecret .certManager.enabled -}}
{{- fail (printf "tls.%s: expected existingSecret or certManager.enabled, got both" $use) -}}
{{- end -}}
{{- if and .certManager.enabled (not .certManager.issuerRef.name) -}}
{{- fail (printf "tls.%s.certManager.issuerRef.name: expected the name of an issuer, because certManager.enabled is true" $use) -}}
{{- end -}}
{{- if and .certManager.enabled (not (has .certManager.issuerRef.kind (list "Issuer" "ClusterIssuer"))) (not .certManager.issuerRef.group) -}}
{{- fail (printf "tls.%s.certManager.issuerRef.group: expected the API group of kind %s, such as awspca.cert-manager.io: cert-manager's own kinds are Issuer and ClusterIssuer" $use .certManager.issuerRef.kind) -}}
{{- end -}}
{{- if and (get .certManager "csi") (not .certManager.enabled) -}}
{{- fail (printf "tls.%s.certManager.csi: expected false without tls.%s.certManager.enabled, which makes the certificates" $use $use) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $key := list "nodeSecret" "routerSecret" -}}
{{- if and (get $.Values.tls.internal $key) (not $.Values.tls.internal.existingSecret) -}}
{{- fail (printf "tls.internal.%s: expected none without tls.internal.existingSecret: cert-manager makes a certificate for each kind of pod (certManager.enabled), got %s" $key (get $.Values.tls.internal $key)) -}}
{{- end -}}
{{- end -}}
{{- $transport := dig "transfer" "transport" "auto" .Values.cluster -}}
{{- $tls := include "tandem.internalTls" . -}}
{{- if and $tls (has $transport (list "nccl" "nixl" "process_group")) -}}
{{- fail (printf "cluster.transfer.transport: expected auto, mapped or tcp with tls.internal, got %s, which cannot be encrypted; set another transport, or remove tls.internal" $transport) -}}
{{- end -}}
{{- $seen := list "nodes" -}}
{{- range $index, $group := .Values.nodeGroups -}}
{{- if has $group.name $seen -}}
{{- fail (printf "nodeGroups[%d].name: expected another name than %s, which another group has" $index $group.name) -}}
{{- end -}}
{{- $seen = append $seen $group.name -}}
{{- end -}}
{{- range $group := include "tandem.usedGroups" . | fromJsonArray -}}
{{- with $group.rdma.resource -}}
{{- if not (has $transport (list "auto" "nixl")) -}}
{{- fail (printf "%s.rdma.resource: expected none with cluster.transfer.transport %s: only nixl, which auto takes too, uses RDMA devices, so %s would be reserved for nothing; remove it, or set cluster.transfer.transport: auto with an image that has NIXL" $group.where $transport .) -}}
{{- end -}}
{{- if $tls -}}
{{- fail (printf "%s.rdma.resource: expected none with tls.internal: nixl cannot be encrypted, so %s would be reserved for nothing; remove one of them" $group.where .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.gateway.enabled (not .Values.gateway.parentRefs) -}}
{{- fail "gateway.parentRefs: expected at least one Gateway ([{name: …, namespace: …}]), because gateway.enabled is true" -}}
{{- end -}}
{{- include "tandem.checkGateway" . -}}
{{- if .Values.node.onHead -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" -}}
{{- if get $.Values.head $key -}}
{{- fail (printf "head.%s: expected none with node.onHead: true: the head pod is placed as a node then; set node.%s, or node.onHead: false" $key $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.service -}}
{{- if and .loadBalancerClass (ne .type "LoadBalancer") -}}
{{- fail (printf "service.loadBalancerClass: expected none with service.type %s: Kubernetes takes it of a LoadBalancer only" .type) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.serviceAccount.name .Values.serviceAccount.annotations -}}
{{- fail "serviceAccount.annotations: expected none with serviceAccount.name: the chart does not change an existing ServiceAccount" -}}
{{- end -}}
{{- with .Values.ingress -}}
{{- if and .enabled (not .host) -}}
{{- fail "ingress.host: expected a host name, because ingress.enabled is true: without one the Ingress would match every host" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.auth.existingSecret (not .Values.test.apiKeySecret.name) -}}
{{- fail "test.apiKeySecret.name: expected the name of a Secret with an API key for `helm test`, because auth.existingSecret is set" -}}
{{- end -}}
{{- include "tandem.checkRouters" . -}}
{{- include "tandem.checkScaleAdapter" . -}}
{{- if eq .Values.upgrade.strategy "rolling" -}}
{{- if not (include "tandem.routerPods" .) -}}
{{- fail "upgrade.strategy: expected recreate without routers in pods of their own: a new head pod would end their requests; set routers.replicas, or routers.autoscaling" -}}
{{- end -}}
{{- if not .Values.ray.gcsFaultTolerance.enabled -}}
{{- fail "upgrade.strategy: expected recreate without ray.gcsFaultTolerance: a new head pod would end every worker; set ray.gcsFaultTolerance.enabled" -}}
{{- end -}}
{{- if .Values.node.onHead -}}
{{- fail "upgrade.strategy: expected recreate with node.onHead: a new head pod would end the workers in it; set node.onHead: false" -}}
{{- end -}}
{{- end -}}
{{- include "tandem.checkPods" . -}}
{{- include "tandem.checkExposure" . -}}
{{- include "tandem.checkSources" . -}}
{{- include "tandem.checkWeights" . -}}
{{- end -}}

{{- define "tandem.checkGateway" -}}
{{- with .Values.gateway -}}
{{- if .inferencePool.enabled -}}
{{- $why := "" -}}
{{- if not .enabled }}{{ $why = "gateway.enabled: expected true, because gateway.inferencePool.enabled is true: the route leads to the pool" }}
{{- else if not .inferencePool.endpointPicker.service }}{{ $why = "gateway.inferencePool.endpointPicker.service: expected the Service of an endpoint picker in this namespace, because gateway.inferencePool.enabled is true" }}
{{- else if not (include "tandem.routerPods" $) }}{{ $why = "routers.replicas: expected at least 1 (or routers.autoscaling), because gateway.inferencePool.enabled is true: the pool is made of router pods" }}
{{- else if include "tandem.edgeSecret" $ }}{{ $why = "gateway.inferencePool.enabled: expected false with tls.edge: the Gateway calls a pool's pods, and the endpoint picker reads their metrics, without TLS" }}
{{- else if include "tandem.asksForKeys" $ }}{{ $why = "gateway.inferencePool.enabled: expected false with keys at the routers: the endpoint picker reads their metrics without one; check keys at the Gateway, and set cluster.security.auth.mode: none" }}
{{- else if not (dig "observability" "metrics" "enabled" true $.Values.cluster) }}{{ $why = "cluster.observability.metrics.enabled: expected true, because gateway.inferencePool.enabled is true: the endpoint picker reads them" }}
{{- end -}}
{{- with $why }}{{ fail . }}{{ end -}}
{{- end -}}
{{- if and .enabled .grpcHostnames (not .hostnames) -}}
{{- fail (printf "gateway.hostnames: expected the hosts of HTTP, because gateway.grpcHostnames is set: without hosts the HTTPRoute would take %s too" (first .grpcHostnames)) -}}
{{- end -}}
{{- range .grpcHostnames -}}
{{- if has . $.Values.gateway.hostnames -}}
{{- fail (printf "gateway.grpcHostnames: expected hosts other than gateway.hostnames, got %s in both: a listener gives a host to one kind of route, and the Gateway would drop the other" .) -}}
{{- end -}}
{{- end -}}
{{- $weights := .weight | int -}}
{{- $seen := list $.Release.Name -}}
{{- range $number, $each := .backends -}}
{{- if has $each.release $seen -}}
{{- fail (printf "gateway.backends[%d].release: expected each release once, and not this one (gateway.weight), got %s again" $number $each.release) -}}
{{- end -}}
{{- $seen = append $seen $each.release -}}
{{- $weights = add $weights $each.weight | int -}}
{{- end -}}
{{- if and .enabled (not $weights) -}}
{{- fail "gateway.weight: expected at least one of gateway.weight and the weights of gateway.backends above 0: the routes would answer nothing" -}}
{{- end -}}
{{- if and .enabled .backends (include "tandem.edgeSecret" $) (not .backendTls.hostname) -}}
{{- fail "gateway.backendTls.hostname: expected a name that the certificates of all releases have, because gateway.backends is set: each has its own Services' names otherwise" -}}
{{- end -}}
{{- if and .enabled (include "tandem.edgeSecret" $) (not .backendTls.caConfigMap) (not .backendTls.wellKnownCas) -}}
{{- fail "gateway.backendTls.caConfigMap: expected the name of a ConfigMap with the authority of the routers' certificate at ca.crt (or gateway.backendTls.wellKnownCas: true), because tls.edge is set: the Gateway would call the routers without TLS" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.checkRouters" -}}
{{- with .Values.routers.autoscaling -}}
{{- if .enabled -}}
{{- if gt ($.Values.routers.replicas | int) 0 -}}
{{- fail "routers.replicas: expected 0 with routers.autoscaling.enabled: the autoscaler sets the number, from minReplicas to maxReplicas" -}}
{{- end -}}
{{- if gt (.minReplicas | int) (.maxReplicas | int) -}}
{{- fail (printf "routers.autoscaling.maxReplicas: expected at least minReplicas (%v), got %v" .minReplicas .maxReplicas) -}}
{{- end -}}
{{- if not (or .cpuPercent .queuedRequests .metrics) -}}
{{- fail "routers.autoscaling: expected cpuPercent, queuedRequests or metrics: there would be nothing to scale by" -}}
{{- end -}}
{{- if and .cpuPercent (not (dig "requests" "cpu" "" $.Values.routers.resources)) -}}
{{- fail "routers.resources.requests.cpu: expected a quantity, because routers.autoscaling.cpuPercent is a share of it" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (not (include "tandem.routerPods" .)) .Values.tls.internal.routerSecret -}}
{{- fail "tls.internal.routerSecret: expected none: routers run in the head pod (routers.replicas is 0)" -}}
{{- end -}}
{{- end -}}

{{- /* Names in `pod` values that are the chart's: Kubernetes would take one of the two, or refuse the pod. */ -}}
{{- define "tandem.checkPods" -}}
{{- $taken := dict
  "env" (list "POD_IP" "POD_NAME" "HOME" "XDG_CACHE_HOME" "XDG_DATA_HOME" "HF_TOKEN" "VALKEY_PASSWORD" "RAY_PASSWORD" "RAY_REDIS_CA_CERT" "RAY_REDIS_ADDRESS" "REDIS_USERNAME" "REDIS_PASSWORD" "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" "RAY_health_check_period_ms" "RAY_health_check_timeout_ms" "RAY_health_check_failure_threshold")
  "volumes" (list "shared-memory" "tmp" "home" "models" "config" "tls-internal" "tls-edge" "keys" "redis-ca" "data" "tls" "autoscaler-token" "api-token")
  "containers" (list "ray-head" "ray-node" "valkey" "router" "autoscaler" "scale")
  "initContainers" (list "ray-head" "ray-node" "valkey" "router" "scale") -}}
{{- $paths := list "/dev/shm" "/tmp" "/home/tandem" "/models" "/etc/tandem" "/etc/tandem-tls/internal" "/etc/tandem-tls/edge" "/etc/tandem-keys" "/etc/tandem-redis" "/etc/valkey-tls" "/data" "/var/run/secrets/kubernetes.io/serviceaccount" -}}
{{- $pods := dict "head.pod" .Values.head.pod "node.pod" .Values.node.pod "routers.pod" .Values.routers.pod "scaleAdapter.pod" .Values.scaleAdapter.pod "redis.valkey.pod" .Values.redis.valkey.pod -}}
{{- range $index, $group := .Values.nodeGroups }}{{ with $group.pod }}{{ $_ := set $pods (printf "nodeGroups[%d].pod" $index) . }}{{ end }}{{ end -}}
{{- range $where, $pod := $pods -}}
{{- range $kind, $names := $taken -}}
{{- range $number, $each := get $pod $kind | default list -}}
{{- if or (has $each.name $names) (hasPrefix "pull-model-" $each.name) -}}
{{- fail (printf "%s.%s[%d].name: expected another name than %s, which the chart uses itself" $where $kind $number $each.name) -}}
{{- end -}}
{{- if and (eq $kind "env") (hasPrefix "TANDEM_" $each.name) -}}
{{- fail (printf "%s.env[%d].name: expected no TANDEM_ variable, got %s: it would override the cluster spec unchecked; set the key in cluster" $where $number $each.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $number, $each := $pod.volumeMounts | default list -}}
{{- if has (trimSuffix "/" $each.mountPath) $paths -}}
{{- fail (printf "%s.volumeMounts[%d].mountPath: expected another path than %s, where the chart mounts a volume itself" $where $number $each.mountPath) -}}
{{- end -}}
{{- end -}}
{{- range $key, $_ := $pod.labels | default dict -}}
{{- if or (hasPrefix "app.kubernetes.io/" $key) (hasPrefix "helm.sh/" $key) (hasPrefix "tandem/" $key) -}}
{{- fail (printf "%s.labels: expected other keys than %s: the chart selects its pods by such labels" $where $key) -}}
{{- end -}}
{{- end -}}
{{- range $key, $_ := $pod.annotations | default dict -}}
{{- if eq $key "checksum/config" -}}
{{- fail (printf "%s.annotations: expected other keys than checksum/config, which the chart sets itself" $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Exposure beyond the cluster's network needs authentication or an explicit mode: none, as `tandem up` does beyond loopback. */ -}}
{{- define "tandem.checkExposure" -}}
{{- $by := "" -}}
{{- with .Values -}}
{{- if ne .service.type "ClusterIP" }}{{ $by = printf "service.type is %s" .service.type }}{{ end -}}
{{- if .ingress.enabled }}{{ $by = "ingress.enabled is true" }}{{ end -}}
{{- if .gateway.enabled }}{{ $by = "gateway.enabled is true" }}{{ end -}}
{{- end -}}
{{- if and $by (not (include "tandem.asksForKeys" .)) (ne (dig "security" "auth" "mode" "" .Values.cluster) "none") -}}
{{- fail (printf "auth.existingSecret: expected the name of a Secret with API keys (or cluster.security.auth.jwt), because %s and anyone who reaches it could call; set cluster.security.auth.mode: none to allow that" $by) -}}
{{- end -}}
{{- end -}}

{{- /* Ports between pods need TLS or the spec's opt-out. Checked last: a value that another check refuses makes the pods several. */ -}}
{{- define "tandem.checkInside" -}}
{{- if and (or (include "tandem.severalPods" .) .Values.scaleAdapter.enabled) (not (include "tandem.internalTls" .)) (not (dig "security" "allow_plaintext" false .Values.cluster)) -}}
{{- $why := ternary "several pods exchange requests and KV blocks" "the scale adapter calls the controller" (eq (include "tandem.severalPods" .) "true") -}}
{{- fail (print "tls.internal: expected existingSecret or certManager.enabled, because " $why " over the network; or set cluster.security.allow_plaintext: true, and rely on the chart's NetworkPolicies") -}}
{{- end -}}
{{- end -}}

{{- /* Checks that the volume at /models can provide the models' sources. */ -}}
{{- define "tandem.checkSources" -}}
{{- with .Values.models -}}
{{- if gt (compact (list .existingClaim .hostPath .image.reference) | len) 1 -}}
{{- fail "models: expected one of existingClaim, hostPath and image.reference, got several: one volume is mounted at /models" -}}
{{- end -}}
{{- if and .image.reference (semverCompare "<1.31-0" $.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "models.image.reference: expected none before Kubernetes 1.31, which has no image volumes, got a cluster of %s; set models.existingClaim" $.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- $volume := include "tandem.modelVolume" . -}}
{{- range $index, $model := .Values.cluster.models -}}
{{- $source := default "smollm2-135m" $model.source -}}
{{- if contains "://" $source -}}
{{- fail (printf "cluster.models[%d].source: expected a hub name or a folder below /models, got %s: nothing here reads from such a store; copy the model to models.existingClaim or models.hostPath" $index $source) -}}
{{- end -}}
{{- if and (hasPrefix "/" $source) (not (hasPrefix "/models/" $source)) -}}
{{- fail (printf "cluster.models[%d].source: expected a folder below /models, where models.existingClaim, models.hostPath or models.image is mounted, or a hub name, got %s" $index $source) -}}
{{- end -}}
{{- if and (hasPrefix "/models/" $source) (not $volume) -}}
{{- fail (printf "models.existingClaim: expected a claim (or models.hostPath, or models.image) that holds %s, the source of cluster.models[%d]: without them the volume at /models is empty" $source $index) -}}
{{- end -}}
{{- if and (not (hasPrefix "/" $source)) $.Values.models.image.reference -}}
{{- fail (printf "cluster.models[%d].source: expected a folder below /models, which models.image is mounted as: nothing can be pulled there, because it is read-only; got %s" $index $source) -}}
{{- end -}}
{{- if and (not (hasPrefix "/" $source)) (not $.Values.models.pull) (not $volume) -}}
{{- fail (printf "models.pull: expected true, or models.existingClaim (or models.hostPath) with %s pulled before: otherwise the source of cluster.models[%d] is missing" $source $index) -}}
{{- end -}}
{{- end -}}
{{- end -}}
