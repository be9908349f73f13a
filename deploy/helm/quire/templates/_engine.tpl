{{/* The pod of an engine: a scheduler and its worker. */}}

{{/* The pod's template. Takes root and pool; rank, which is "follower" for all pods of a group but the first. */}}
{{- define "quire.engine" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $follower := eq (.rank | default "leader") "follower" -}}
{{- $component := ternary "engine-rank" "engine" $follower -}}
metadata:
  labels:
    {{- include "quire.podLabels" (dict "root" $root "component" $component) | nindent 4 }}
    quire-pool: {{ $pool.name }}
    quire-role: {{ $pool.role }}
  {{- include "quire.podAnnotations" $root | nindent 2 }}
spec:
  {{- include "quire.podSpec" (dict "root" $root "component" "engine" "pool" $pool.name) | nindent 2 }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pool.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    {{- if not $follower }}
    {{- include "quire.engine.scheduler" . | nindent 4 }}
    {{- end }}
    {{- include "quire.engine.worker" . | nindent 4 }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    - name: cache
      emptyDir: {sizeLimit: {{ int $pool.cacheGiB }}Gi}
    {{- if gt (int $pool.gpu.count) 0 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: 1Gi}
    {{- end }}
    {{- include "quire.modelVolume" $root | nindent 4 }}
    {{- include "quire.secretVolumes" (dict "root" $root "identities" (list "scheduler" "worker") "redis" true "pageMac" true) | nindent 4 }}
{{- end -}}

{{- define "quire.engine.scheduler" -}}
- name: scheduler
  image: {{ include "quire.image" (dict "root" .root "image" "scheduler") }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  args:
    {{- include "quire.commonArgs" (dict "root" .root "identity" "scheduler" "port" 50052 "metricsPort" 9090) | nindent 4 }}
    {{- include "quire.discoveryArgs" (dict "root" .root "port" 50052) | nindent 4 }}
    - --drain-delay-s={{ int .root.Values.drain.delaySeconds }}
    - --worker=127.0.0.1:50053
    - --role={{ .pool.role }}
    {{- include "quire.engine.kvstore" . | nindent 4 }}
    {{- include "quire.optionArgs" .pool.options.scheduler | nindent 4 }}
  env:
    {{- include "quire.env" .root | nindent 4 }}
  ports:
    - {name: grpc, containerPort: 50052}
    - {name: metrics, containerPort: 9090}
  {{- include "quire.probes" (dict "port" 9090 "scheme" (include "quire.scheme" .root) "startupSeconds" .pool.startupSeconds) | nindent 2 }}
  resources:
    {{- toYaml .pool.resources.scheduler | nindent 4 }}
  {{- include "quire.containerSecurity" . | nindent 2 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- include "quire.secretMounts" (dict "root" .root "identity" "scheduler" "redis" true) | nindent 4 }}
{{- end -}}

{{- define "quire.engine.kvstore" -}}
{{- if .root.Values.kvstore.enabled }}
{{- $name := include "quire.name" .root }}
- --kvstore={{ $name }}-kvstore-{{ int .pool.kvstore }}.{{ $name }}-kvstore.{{ .root.Release.Namespace }}.svc:50054
{{- end }}
{{- end -}}

{{/* The worker listens on 127.0.0.1: its scheduler alone calls it. It gets SIGTERM only after its scheduler's delay. */}}
{{- define "quire.engine.worker" -}}
- name: worker
  image: {{ include "quire.image" (dict "root" .root "image" (ternary "worker-gpu" "worker-cpu" (gt (int .pool.gpu.count) 0))) }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  args:
    {{- include "quire.commonArgs" (dict "root" .root "identity" "worker" "host" "127.0.0.1" "port" 50053 "metricsPort" 9091) | nindent 4 }}
    - --model={{ .pool.model.path }}
    - --served-model-name={{ .pool.model.name | default .pool.model.path }}
    {{- with .pool.model.revision }}
    - --revision={{ . }}
    {{- end }}
    - --device={{ ternary "cuda" "cpu" (gt (int .pool.gpu.count) 0) }}
    {{- include "quire.engine.kvstore" . | nindent 4 }}
    {{- if .root.Values.pageMac.secretName }}
    - --page-mac-key-file=/secrets/page-mac/key
    {{- end }}
    {{- if include "quire.peers" .root }}
    - --peer-listen=0.0.0.0:50055
    - --peer-grpc-listen=0.0.0.0:50056
    - --peer-advertise=$(POD_IP)
    - --peer-hosts={{ join "," .root.Values.podNetworks }}
    {{- else }}
    - --peer-listen=off
    - --peer-grpc-listen=off
    {{- end }}
    {{- include "quire.optionArgs" .pool.options.worker | nindent 4 }}
  env:
    {{- include "quire.env" .root | nindent 4 }}
    {{- include "quire.hubEnv" .root | nindent 4 }}
    {{- if gt (int .pool.ranks) 1 }}
    - name: RANK
      valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
    - {name: WORLD_SIZE, value: {{ int .pool.ranks | quote }}}
    - {name: MASTER_ADDR, value: $(LWS_LEADER_ADDRESS)}
    - {name: MASTER_PORT, value: "50057"}
    {{- end }}
  ports:
    - {name: worker-metrics, containerPort: 9091}
    {{- if include "quire.peers" .root }}
    - {name: peer, containerPort: 50055}
    - {name: peer-grpc, containerPort: 50056}
    {{- end }}
    {{- if gt (int .pool.ranks) 1 }}
    - {name: ranks, containerPort: 50057}
    {{- end }}
  {{- include "quire.probes" (dict "port" 9091 "scheme" (include "quire.scheme" .root) "startupSeconds" .pool.startupSeconds) | nindent 2 }}
  lifecycle:
    preStop: {sleep: {seconds: {{ int .root.Values.drain.delaySeconds }}}}
  resources:
    {{- $resources := deepCopy .pool.resources.worker }}
    {{- if gt (int .pool.gpu.count) 0 }}
    {{- $resources = mergeOverwrite $resources (dict "limits" (dict .pool.gpu.resource (int .pool.gpu.count))) }}
    {{- end }}
    {{- toYaml $resources | nindent 4 }}
  {{- include "quire.containerSecurity" . | nindent 2 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /var/cache/quire}
    {{- if gt (int .pool.gpu.count) 0 }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    {{- include "quire.modelMount" .root | nindent 4 }}
    {{- include "quire.secretMounts" (dict "root" .root "identity" "worker" "pageMac" true) | nindent 4 }}
{{- end -}}

{{/* The spec of a LeaderWorkerSet. Takes root and pool. */}}
{{- define "quire.leaderWorkerSet" -}}
{{- if not .pool.autoscaling.enabled }}
replicas: {{ int .pool.replicas }}
{{- end }}
rolloutStrategy:
  type: RollingUpdate
  rollingUpdateConfiguration:
    {{- toYaml .pool.rollout | nindent 4 }}
leaderWorkerTemplate:
  size: {{ int .pool.ranks }}
  restartPolicy: {{ ternary "RecreateGroupOnPodRestart" "None" (gt (int .pool.ranks) 1) }}
  {{- if gt (int .pool.ranks) 1 }}
  leaderTemplate:
    {{- include "quire.engine" . | nindent 4 }}
  workerTemplate:
    {{- include "quire.engine" (merge (dict "rank" "follower") .) | nindent 4 }}
  {{- else }}
  workerTemplate:
    {{- include "quire.engine" . | nindent 4 }}
  {{- end }}
{{- end -}}
