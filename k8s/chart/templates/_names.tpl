{{- define "pronghorn.labels" -}}
app.kubernetes.io/name: pronghorn
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "pronghorn.selector" -}}
app.kubernetes.io/name: pronghorn
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* Whatever leaves waits for its streams as long as a stream may last; Serve, Ray and Kubernetes wait longer, in turn. */ -}}
{{- define "pronghorn.serveShutdownSeconds" -}}{{ add .Values.deadlineSeconds 20 }}{{- end -}}
{{- define "pronghorn.raySeconds" -}}{{ add .Values.deadlineSeconds 40 }}{{- end -}}
{{- define "pronghorn.graceSeconds" -}}{{ add .Values.deadlineSeconds 60 }}{{- end -}}

{{- define "pronghorn.bytes" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- $unit := trimPrefix $number . -}}
{{- mulf (float64 $number) (get $units $unit | default 1) | int64 -}}
{{- end -}}

{{- define "pronghorn.application" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
applications:
  - name: pronghorn
    route_prefix: /
    import_path: cluster.build:app
    args:
      model_path: {{ .Values.model.path | quote }}
      model_name: {{ .Values.model.name | quote }}
      # While one cluster takes over from another both are in the directory: what could differ between their blocks is
      # in the prefix, so that neither takes the other's nodes for its own.
      key_prefix: {{ printf "pronghorn:%s:%s" .Release.Name (list .Values.image .Values.model .Values.service | toJson | sha256sum | trunc 12) | quote }}
      # The address and its password come from REDIS_URL, which a Secret gives to every pod.
      redis_url: ""
      prefill: {{ .Values.prefill.replicas }}
      decode: {{ .Values.decode.replicas }}
      orchestrators: {{ .Values.gateway.replicas }}
      kv_memory_bytes: {{ include "pronghorn.bytes" .Values.nodes.kvMemory }}
      threads: {{ .Values.nodes.threads }}
      device: {{ ternary "cuda" "cpu" (gt (int .Values.decode.gpus) 0) }}
      deadline_s: {{ .Values.deadlineSeconds }}
      drain_timeout_s: {{ .Values.deadlineSeconds }}
      {{- with .Values.service }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    deployments:
      {{- range $deployment, $pool := dict "orchestrator" "gateway" "prefill" "prefill" "decode" "decode" }}
      {{- $gpus := int ((get $.Values $pool).gpus | default 0) }}
      - name: {{ $deployment }}
        max_replicas_per_node: 1
        # There is a pod for each replica and none to spare: an old one goes before a new one comes.
        max_surge_percent: 0
        graceful_shutdown_timeout_s: {{ include "pronghorn.serveShutdownSeconds" $ }}
        ray_actor_options:
          num_cpus: 0
          num_gpus: {{ $gpus }}
          label_selector: {pronghorn.io/pool: {{ $pool }}}
      {{- end }}
{{- end -}}

{{- define "pronghorn.environment" -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
# Workers outlive a head that is away for so long.
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ include "pronghorn.raySeconds" . | quote }}}
- name: VALKEY_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.valkey.existingSecret }}, key: {{ .Values.valkey.passwordKey }}}}
- {name: REDIS_URL, value: "redis://:$(VALKEY_PASSWORD)@{{ .Release.Name }}-valkey-directory:6379/0"}
{{- end -}}

{{- /* A pod of Ray. Takes a list: the root, the container's name, the pool's values, ports and probes as text. */ -}}
{{- define "pronghorn.pod" -}}
{{- $root := index . 0 }}{{ $container := index . 1 }}{{ $pool := index . 2 }}{{ $ports := index . 3 }}{{ $probes := index . 4 -}}
metadata:
  labels:
    {{- include "pronghorn.labels" $root | nindent 4 }}
spec:
  terminationGracePeriodSeconds: {{ include "pronghorn.graceSeconds" $root }}
  automountServiceAccountToken: false
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    seccompProfile: {type: RuntimeDefault}
  {{- with $pool.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "pronghorn.selector" $root | nindent 10 }}
  containers:
    - name: {{ $container }}
      image: "{{ $root.Values.image.repository }}:{{ $root.Values.image.tag }}"
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities: {drop: [ALL]}
      env:
        {{- include "pronghorn.environment" $root | nindent 8 }}
      ports:
        {{- $ports | nindent 8 }}
      resources:
        requests:
          {{- toYaml $pool.resources.requests | nindent 10 }}
        limits:
          {{- toYaml $pool.resources.limits | nindent 10 }}
          {{- if $pool.gpus }}
          nvidia.com/gpu: {{ $pool.gpus }}
          {{- end }}
      {{- $probes | nindent 6 }}
      lifecycle:
        preStop:
          # Endpoints forget the pod before it stops taking connections.
          sleep: {seconds: 5}
      volumeMounts:
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: scratch, mountPath: /tmp}
        {{- if $root.Values.model.existingClaim }}
        - {name: model, mountPath: {{ $root.Values.model.mountPath }}, readOnly: true}
        {{- end }}
  volumes:
    # Ray's object store; the block pools of nodes are memory of their own.
    - {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: 1Gi}}
    - {name: scratch, emptyDir: {}}
    {{- if $root.Values.model.existingClaim }}
    - {name: model, persistentVolumeClaim: {claimName: {{ $root.Values.model.existingClaim }}, readOnly: true}}
    {{- end }}
{{- end -}}
